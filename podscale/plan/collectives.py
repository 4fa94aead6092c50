"""How long an all-reduce takes: latency and bandwidth of two axes, one formula an algorithm.

The alpha-beta model. A message of B bytes between neighbours on an axis takes `latency + B * per_byte` seconds, with
every group of that axis busy at the same time. Summed over an algorithm's steps that is an affine function of the
bucket's size S: what each formula here returns. p = ranks in a row (a node), N = rows, n = p N.

Sources: ring and its halves, Patarasuk and Yuan 2009 (bandwidth optimal, 2(n-1)/n S); torus, Ying 2018 section 3.3
and Kumar 2019; hierarchical, Jia 2018 (4(p-1) + 2(N-1) steps); tree, recursive halving of the number of hops. NCCL
chooses by formulas of the same form (src/graph/tuning.cc; see plan/nccl.py).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil, log2
from typing import NamedTuple


class Line(NamedTuple):
    """Seconds of an all-reduce of S bytes: fixed + S * per_byte."""

    fixed: float
    per_byte: float

    def __call__(self, size: float) -> float:
        return self.fixed + size * self.per_byte

    def __add__(self, other: object) -> "Line":
        """One after the other."""
        assert isinstance(other, Line)
        return Line(self.fixed + other.fixed, self.per_byte + other.per_byte)

    def of_share(self, share: float) -> "Line":
        """The same on a share of the bytes."""
        return Line(self.fixed, self.per_byte * share)


class Axis(NamedTuple):
    """Ranks that form one group, seconds a message between neighbours, and seconds a byte of it.

    per_byte holds for one rank while every group of the axis is busy: where the ranks of a node share its network card,
    that is p times the card's.
    """

    ranks: int
    latency: float
    per_byte: float

    def steps(self, steps: float, share: float) -> Line:
        """`steps` messages one after the other that carry `share` of the bytes together."""
        return Line(steps * self.latency, share * self.per_byte)

    def reduce_scatter(self) -> Line:
        """A ring: each rank passes on all parts but its own. An all-gather costs the same."""
        return self.steps(self.ranks - 1, (self.ranks - 1) / self.ranks)

    def all_reduce(self) -> Line:
        """Reduce-scatter and all-gather, in a ring."""
        return self.reduce_scatter() + self.reduce_scatter()


@dataclass(frozen=True)
class Fabric:
    """The links of a job as its collectives meet them.

    row: inside nodes. column: between them, all columns at once. world: one ring through all ranks; its latency is the
    mean of its hops, its per_byte that of the slowest hop.
    """

    row: Axis
    column: Axis
    world: Axis

    @property
    def alone(self) -> Axis:
        """Between nodes, one rank of each at a time: the ring through all ranks crosses the same links like that."""
        column = self.column
        return column._replace(per_byte=min(column.per_byte, max(self.row.per_byte, self.world.per_byte)))


def flat(fabric: Fabric) -> Line:
    """One ring through all ranks: 2(n-1) steps, 2(n-1)/n S over every link."""
    return fabric.world.all_reduce()


def torus2d(fabric: Fabric) -> Line:
    """Reduce-scatter in the row, all-reduce of 1/p of the bytes in the column, all-gather in the row."""
    row = fabric.row.reduce_scatter()
    return row + fabric.column.all_reduce().of_share(1 / fabric.row.ranks) + row


def hierarchical(fabric: Fabric) -> Line:
    """Reduce to each row's master, ring among the masters, broadcast (Jia 2018): 4(p-1) + 2(N-1) steps.

    Reduction and broadcast in a row are bandwidth optimal: scattered and gathered, 2(p-1)/p S each.
    """
    inside = fabric.row.all_reduce()
    return inside + fabric.alone.all_reduce() + inside


def tree(fabric: Fabric) -> Line:
    """Up and down a binary tree of masters over the rows: every level carries all bytes."""
    levels_inside, levels_across = (ceil(log2(axis.ranks)) for axis in (fabric.row, fabric.column))
    return fabric.row.steps(2 * levels_inside, 2 * levels_inside) + fabric.alone.steps(
        2 * levels_across, 2 * levels_across
    )


ALGORITHMS: Mapping[str, Callable[[Fabric], Line]] = {
    "flat": flat,
    "ring": flat,
    "tree": tree,
    "hierarchical": hierarchical,
    "torus2d": torus2d,
}


def hybrid_threshold(fabric: Fabric) -> float:
    """Bytes from which a ring beats the hierarchy (Jia 2018 leaves his threshold unpublished); infinite if never."""
    small, large = hierarchical(fabric), flat(fabric)
    if large.per_byte >= small.per_byte:
        return float("inf") if small.fixed <= large.fixed else 0.0
    return max(0.0, (large.fixed - small.fixed) / (small.per_byte - large.per_byte))


def bandwidth_bound(size: float, nodes: int, ranks: int, rank_rate: float, node_rate: float) -> float:
    """Seconds below which no all-reduce of `size` bytes can stay, whatever its algorithm, when latency costs nothing.

    Of m parties the mean one sends 2(m-1)/m of the bytes: m = all ranks, over a link of rank_rate bytes/s each, and
    m = nodes, over one of node_rate bytes/s each. Both kinds of link can be busy at once.
    """
    everyone = nodes * ranks
    inside = 2 * (everyone - 1) / everyone * size / rank_rate
    across = 2 * (nodes - 1) / nodes * size / node_rate
    return max(inside, across)
