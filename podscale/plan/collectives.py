"""How long an all-reduce takes: latency and bandwidth of two axes, one formula an algorithm.

The alpha-beta model. A message of B bytes between neighbours on an axis takes `latency + B * per_byte` seconds, with
every group of that axis busy at the same time. p = ranks in a row (a node), N = rows, n = p N, S = bytes.

Sources: ring and its halves, Patarasuk and Yuan 2009 (bandwidth optimal, 2(n-1)/n S over every link); double tree,
Sanders 2009; torus, Ying 2018 section 3.3 and Kumar 2019; hierarchical, Jia 2018; phases on different links one behind
the other in slices, BlueConnect (Cho 2019). NCCL chooses by formulas of the same form (see plan/nccl.py).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import ceil, log2
from typing import NamedTuple


class AffineCost(NamedTuple):
    """Seconds of an all-reduce of S bytes: fixed + S * per_byte."""

    fixed: float
    per_byte: float

    def __call__(self, size: float) -> float:
        return self.fixed + size * self.per_byte

    def __add__(self, other: object) -> "AffineCost":
        """One after the other."""
        assert isinstance(other, AffineCost)
        return AffineCost(self.fixed + other.fixed, self.per_byte + other.per_byte)

    def for_fraction(self, fraction: float) -> "AffineCost":
        """The same on a share of the bytes."""
        return AffineCost(self.fixed, self.per_byte * fraction)


class LinkAxis(NamedTuple):
    """Ranks that form one group, seconds a message between neighbours, and seconds a byte of it.

    per_byte holds for one rank while every group of the axis is busy: where the ranks of a node share its network card,
    that is p times the card's.
    """

    ranks: int
    latency: float
    per_byte: float

    def message_cost(self, steps: float, fraction: float) -> AffineCost:
        """`steps` messages one after the other that carry `share` of the bytes together."""
        return AffineCost(steps * self.latency, fraction * self.per_byte)

    def reduce_scatter(self) -> AffineCost:
        """A ring: each rank passes on all parts but its own. An all-gather costs the same."""
        return self.message_cost(self.ranks - 1, (self.ranks - 1) / self.ranks)

    def all_reduce(self) -> AffineCost:
        """Reduce-scatter and all-gather, in a ring."""
        return self.reduce_scatter() + self.reduce_scatter()


@dataclass(frozen=True)
class Fabric:
    """The links of a job as its collectives meet them.

    row: inside nodes. column: between them, all columns at once. world: one ring through all ranks; its latency is the
    mean of its hops, its per_byte that of the slowest hop.
    """

    row: LinkAxis
    column: LinkAxis
    world: LinkAxis
    slice_bytes: int = 2 * 2**20
    """Of a bucket whose phases go one behind the other; and how many slices at most."""
    most_slices: int = 8

    def with_wire_formats(self, row: float, column: float) -> "Fabric":
        """The same links for shorter messages: shares of fp32 along rows, and along columns and through all ranks."""
        shares = {"row": row, "column": column, "world": column}
        axes = {name: getattr(self, name) for name in shares}
        lighter = {name: axis._replace(per_byte=axis.per_byte * shares[name]) for name, axis in axes.items()}
        return replace(self, **lighter)

    @property
    def uncontended_column(self) -> LinkAxis:
        """Between nodes, one rank of each at a time: the ring through all ranks crosses the same links like that."""
        column = self.column
        return column._replace(per_byte=min(column.per_byte, max(self.row.per_byte, self.world.per_byte)))


def flat(fabric: Fabric, size: float) -> float:
    """One ring through all ranks: 2(n-1) steps, 2(n-1)/n S over every link."""
    return fabric.world.all_reduce()(size)


def tree(fabric: Fabric, size: float) -> float:
    """Two binary trees with half of the data each: 2 log2 n hops, 2 log2 N of them between nodes; up to 2 S a link."""
    inside, across = (ceil(log2(axis.ranks)) for axis in (fabric.row, fabric.column))
    fixed = 2 * (inside * fabric.row.latency + across * fabric.column.latency)
    return fixed + 2 * size * (fabric.uncontended_column.per_byte if across else fabric.row.per_byte)


def hierarchical(fabric: Fabric, size: float) -> float:
    """Reduce to each row's master, ring among the masters, broadcast: 2(p-1) + 2(N-1) steps.

    Segments go along a chain in a row, so a row's links carry S one way and S the other. (Jia 2018 counts 4(p-1) steps,
    for rows that scatter and gather.)
    """
    row, across = fabric.row, fabric.uncontended_column.all_reduce()
    way = row.message_cost(row.ranks - 1, 1.0 if row.ranks > 1 else 0.0)
    own = way + AffineCost(0.0, _crossing_fraction(fabric) * row.per_byte)
    return _pipelined_slices(fabric, size, [way, across, way], busiest=max(own, across, key=_per_byte))


def torus2d(fabric: Fabric, size: float) -> float:
    """Reduce-scatter in the row, all-reduce of 1/p of the bytes in the column, all-gather in the row."""
    row = fabric.row.reduce_scatter()
    across = fabric.column.all_reduce().for_fraction(1 / fabric.row.ranks)
    own = row + row + AffineCost(0.0, _crossing_fraction(fabric) / fabric.row.ranks * fabric.row.per_byte)
    return _pipelined_slices(fabric, size, [row, across, row], busiest=max(own, across, key=_per_byte))


def _crossing_fraction(fabric: Fabric) -> float:
    """Of the bytes, what one ring across rows sends: it passes the sender's own link, too."""
    return 2 * (fabric.column.ranks - 1) / fabric.column.ranks


def _pipelined_slices(fabric: Fabric, size: float, phases: list[AffineCost], busiest: AffineCost) -> float:
    """Slices of a bucket one behind the other through phases on different links: after the first the busiest rules."""
    grid = fabric.row.ranks > 1 and fabric.column.ranks > 1
    slices = max(1, min(fabric.most_slices, int(size // fabric.slice_bytes))) if grid else 1
    share = size / slices
    return sum(phase(share) for phase in phases) + (slices - 1) * busiest(share)


def _per_byte(line: AffineCost) -> float:
    return line.per_byte


ALGORITHMS: Mapping[str, Callable[[Fabric, float], float]] = {
    "flat": flat,
    "ring": flat,
    "tree": tree,
    "hierarchical": hierarchical,
    "torus2d": torus2d,
}
"""Seconds of an all-reduce of so many bytes."""


def crossover_bytes(
    fabric: Fabric, small: Callable[[Fabric, float], float], large: Callable[[Fabric, float], float]
) -> float:
    """Bytes from which `large` is the faster one, to a power of two; infinite if it never is below 1 GiB."""
    sizes = [float(2**power) for power in range(10, 31)]
    return next((size for size in sizes if large(fabric, size) < small(fabric, size)), float("inf"))


def bandwidth_bound(size: float, nodes: int, ranks: int, rank_rate: float, node_rate: float) -> float:
    """Seconds below which no all-reduce of `size` bytes can stay, whatever its algorithm, when latency costs nothing.

    Of m parties the mean one sends 2(m-1)/m of the bytes: m = all ranks, over a link of rank_rate bytes/s each, and
    m = nodes, over one of node_rate bytes/s each. Both kinds of link can be busy at once.
    """
    everyone = nodes * ranks
    inside = 2 * (everyone - 1) / everyone * size / rank_rate
    across = 2 * (nodes - 1) / nodes * size / node_rate
    return max(inside, across)
