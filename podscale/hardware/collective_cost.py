"""Cost model of an all-reduce: a formula for each algorithm, the fit of the links, and the choice of the fastest.

The alpha-beta model. A message of B bytes between neighbours on an axis takes `latency + B * per_byte` seconds, with
every group of that axis busy at the same time. p = ranks in a row (a node), N = rows, n = p N, S = bytes (`size`).

Sources: ring and its halves, Patarasuk and Yuan 2009 (bandwidth optimal, 2(n-1)/n S over every link); double tree,
Sanders 2009; torus, Mikami 2018; hierarchical, Jia 2018; phases on different links one behind the other in slices,
BlueConnect (Cho 2019).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, log2
from operator import attrgetter
from typing import NamedTuple

import numpy as np


class AffineCost(NamedTuple):
    """Seconds of an all-reduce of S bytes: fixed + S * per_byte."""

    fixed: float
    per_byte: float

    def __call__(self, size: float) -> float:
        """Return the seconds for `size` bytes."""
        return self.fixed + size * self.per_byte

    def __add__(self, other: object) -> "AffineCost":
        assert isinstance(other, AffineCost)
        return AffineCost(self.fixed + other.fixed, self.per_byte + other.per_byte)

    def for_fraction(self, fraction: float) -> "AffineCost":
        """Return the cost if only this fraction of the bytes is reduced."""
        return AffineCost(self.fixed, self.per_byte * fraction)


class LinkAxis(NamedTuple):
    """Links of an axis: ranks of a group, seconds per message between neighbours, and seconds per byte.

    per_byte holds for one rank while every group of the axis is busy: if the ranks of a node share its network card,
    it is p times the card's.
    """

    ranks: int
    latency: float
    per_byte: float

    def message_cost(self, steps: float, fraction: float) -> AffineCost:
        """Return the cost of `steps` sequential messages that carry `fraction` of the bytes together."""
        return AffineCost(steps * self.latency, fraction * self.per_byte)

    def reduce_scatter(self) -> AffineCost:
        """Return the cost of a ring: each rank forwards all parts but its own. An all-gather costs the same."""
        return self.message_cost(self.ranks - 1, (self.ranks - 1) / self.ranks)

    def all_reduce(self) -> AffineCost:
        return self.reduce_scatter() + self.reduce_scatter()


@dataclass(frozen=True)
class Fabric:
    """Links of a job.

    Args:
        row: inside nodes.
        column: between nodes, all columns at once.
        world: one ring through all ranks; its latency is the mean of its hops, its per_byte that of the slowest hop.
        slice_bytes: size of the slices of a bucket whose phases are pipelined.
    """

    row: LinkAxis
    column: LinkAxis
    world: LinkAxis
    slice_bytes: int = 2 * 2**20
    max_slices: int = 8

    def with_wire_formats(self, row: float, column: float) -> "Fabric":
        """Return the links for shorter messages.

        Args:
            row: Size of a message along rows, as a fraction of fp32's.
            column: The same along columns, and along the ring through all ranks.
        """
        return replace(
            self,
            row=self.row._replace(per_byte=self.row.per_byte * row),
            column=self.column._replace(per_byte=self.column.per_byte * column),
            world=self.world._replace(per_byte=self.world.per_byte * column),
        )

    @property
    def uncontended_column(self) -> LinkAxis:
        """Links between nodes, used by one rank of each node at a time, as the ring through all ranks does."""
        column = self.column
        return column._replace(per_byte=min(column.per_byte, max(self.row.per_byte, self.world.per_byte)))


def flat(fabric: Fabric, size: float) -> float:
    """Return the seconds of one ring through all ranks for `size` bytes S: 2(n-1) steps, 2(n-1)/n S over every link."""
    return fabric.world.all_reduce()(size)


def tree(fabric: Fabric, size: float) -> float:
    """Return the seconds of two binary trees for `size` bytes S, with half of them each.

    A tree has 2 log2 n hops, 2 log2 N of them across nodes, and a link carries up to 2 S.
    """
    inside, across = (ceil(log2(axis.ranks)) for axis in (fabric.row, fabric.column))
    fixed = 2 * (inside * fabric.row.latency + across * fabric.column.latency)
    return fixed + 2 * size * (fabric.uncontended_column.per_byte if across else fabric.row.per_byte)


def hierarchical(fabric: Fabric, size: float) -> float:
    """Return the seconds of a reduce to each row's master, a ring among masters, and a broadcast, for `size` bytes S.

    They take 2(p-1) + 2(N-1) steps. Segments go along a chain in a row, so a row's links carry S one way and S the
    other. (Jia 2018 counts 4(p-1) steps, for rows that scatter and gather.)
    """
    row, across = fabric.row, fabric.uncontended_column.all_reduce()
    chain = row.message_cost(row.ranks - 1, 1.0 if row.ranks > 1 else 0.0)
    inside = chain + AffineCost(0.0, _crossing_fraction(fabric) * row.per_byte)
    return _pipelined_slices(fabric, size, [chain, across, chain], inside, across)


def torus2d(fabric: Fabric, size: float) -> float:
    """Return the seconds of a reduce-scatter in the row, 1/p all-reduced in the column, and an all-gather in the row.

    Args:
        size: Bytes of the message.
    """
    row = fabric.row.reduce_scatter()
    across = fabric.column.all_reduce().for_fraction(1 / fabric.row.ranks)
    inside = row + row + AffineCost(0.0, _crossing_fraction(fabric) / fabric.row.ranks * fabric.row.per_byte)
    return _pipelined_slices(fabric, size, [row, across, row], inside, across)


def _crossing_fraction(fabric: Fabric) -> float:
    """Return the fraction of the bytes that one ring across rows sends, which also passes the sender's own link."""
    return 2 * (fabric.column.ranks - 1) / fabric.column.ranks


def _pipelined_slices(fabric: Fabric, size: float, phases: list[AffineCost], *links: AffineCost) -> float:
    """Return the seconds of a bucket whose slices pass the phases as a pipeline, limited by the busiest link."""
    has_grid = fabric.row.ranks > 1 and fabric.column.ranks > 1
    slices = max(1, min(fabric.max_slices, int(size // fabric.slice_bytes))) if has_grid else 1
    busiest = max(links, key=lambda cost: cost.per_byte)
    return sum(phase(size / slices) for phase in phases) + (slices - 1) * busiest(size / slices)


ALGORITHMS: Mapping[str, Callable[[Fabric, float], float]] = {
    "flat": flat,
    "ring": flat,
    "tree": tree,
    "hierarchical": hierarchical,
    "torus2d": torus2d,
}
"""Functions that return the seconds of an all-reduce of a number of bytes."""


def crossover_bytes(
    fabric: Fabric, small: Callable[[Fabric, float], float], large: Callable[[Fabric, float], float]
) -> float:
    """Return the bytes from which `large` is faster, to a power of two; infinite if it never is up to 1 GiB."""
    sizes = [float(2**power) for power in range(10, 31)]
    return next((size for size in sizes if large(fabric, size) < small(fabric, size)), float("inf"))


def bandwidth_bound(size: float, nodes: int, ranks: int, rank_rate: float, node_rate: float) -> float:
    """Return a lower bound of the seconds of any all-reduce of `size` bytes, without latency.

    Each of m parties sends 2(m-1)/m of the bytes on average: m = all ranks, over a link of rank_rate bytes/s each, and
    m = nodes, over a link of node_rate bytes/s each. Both kinds of link can be busy at once.
    """
    world_size = nodes * ranks
    inside = 2 * (world_size - 1) / world_size * size / rank_rate
    across = 2 * (nodes - 1) / nodes * size / node_rate
    return max(inside, across)


MIN_LATENCY, MIN_PER_BYTE = 1e-7, 1e-13
"""Lower bounds of a fit, seconds and seconds per byte: a fit of noisy times may be zero."""


def fit_affine_cost(sizes: Sequence[int], seconds: Sequence[float]) -> AffineCost:
    """Fit a cost without negative parts to the seconds of messages by size in bytes.

    Minimises the squares of the relative errors. With absolute errors, the noise of the largest message would hide the
    latency.
    """
    size, time = np.asarray(sizes, float), np.asarray(seconds, float)
    rows = np.stack([1 / time, size / time], axis=1)
    one = np.ones(len(size))
    (fixed, per_byte), *_ = np.linalg.lstsq(rows, one, rcond=None)
    if fixed < 0:  # noise: the nearest possible fit goes through the origin
        fixed, per_byte = 0.0, np.linalg.lstsq(rows[:, 1:], one, rcond=None)[0][0]
    elif per_byte <= 0:  # too small messages to measure bandwidth: the largest one gives a lower bound
        fixed, per_byte = time.min(), time[-1] / size[-1]
    return AffineCost(float(fixed), float(per_byte))


def fit_link_axis(ranks: int, sizes: Sequence[int], seconds: Sequence[float]) -> LinkAxis:
    """Fit the links of an axis to the seconds of ring all-reduces over `ranks`, by size in bytes."""
    if ranks == 1:
        return LinkAxis(1, MIN_LATENCY, MIN_PER_BYTE)
    line, unit = fit_affine_cost(sizes, seconds), LinkAxis(ranks, 1.0, 1.0).all_reduce()
    latency, per_byte = line.fixed / unit.fixed, line.per_byte / unit.per_byte
    return LinkAxis(ranks, max(latency, MIN_LATENCY), max(per_byte, MIN_PER_BYTE))


BUCKET_SIZES_MB = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
MIN_ADVANTAGE = 0.95
"""Largest fraction of the time of `flat` at which another algorithm is chosen: the cost model is not exact."""


@dataclass(frozen=True)
class AllReduceChoice:
    """Algorithm and bucket size, with the predicted seconds of all buckets plus the last one, which nothing hides."""

    algorithm: str
    bucket_mb: float
    seconds: float


def choose_all_reduce(fabric: Fabric, gradient_bytes: int, algorithms: Sequence[str]) -> AllReduceChoice:
    """Return the fastest of `algorithms` with its bucket size, by the cost model.

    Many small buckets pay for latency; few large ones leave a long last bucket after backward. Therefore the time of
    all buckets plus one is minimised. Between equals the larger bucket wins.
    """
    candidates = [
        AllReduceChoice(name, bucket, _exposed_seconds(fabric, name, bucket, gradient_bytes))
        for name in algorithms
        for bucket in reversed(BUCKET_SIZES_MB)
    ]
    best = min(candidates, key=attrgetter("seconds"))
    plain = [choice for choice in candidates if choice.algorithm == "flat"]
    fallback = min(plain, key=attrgetter("seconds"), default=best)
    return best if best.seconds <= MIN_ADVANTAGE * fallback.seconds else fallback


def _exposed_seconds(fabric: Fabric, algorithm: str, bucket_mb: float, gradient_bytes: int) -> float:
    bucket = min(bucket_mb * 2**20, gradient_bytes)
    return (ceil(gradient_bytes / bucket) + 1) * ALGORITHMS[algorithm](fabric, bucket)
