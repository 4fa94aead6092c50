"""Cost model of an all-reduce: latency and bandwidth of two axes, one formula per algorithm.

The alpha-beta model. A message of B bytes between neighbours on an axis takes `latency + B * per_byte` seconds, with
every group of that axis busy at the same time. p = ranks in a row (a node), N = rows, n = p N, S = bytes.

Sources: ring and its halves, Patarasuk and Yuan 2009 (bandwidth optimal, 2(n-1)/n S over every link); double tree,
Sanders 2009; torus, Ying 2018 section 3.3 and Kumar 2019; hierarchical, Jia 2018; phases on different links one behind
the other in slices, BlueConnect (Cho 2019). NCCL chooses by formulas of the same form (see plan/nccl.py).

NCCL's own prior of its all-reduce, as far as a ring and a tree need it.

Formulas and latencies of NVIDIA/nccl 2.30.7, src/graph/tuning.cc; the tree's correction by message size as that file
had it in 2.8 (the sizes from 256 MB on are newer). It is what NCCL chooses by, not a measurement.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, log2
from typing import Literal, NamedTuple


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


NcclProtocol = Literal["LL", "LL128", "Simple"]
NCCL_PROTOCOLS: tuple[NcclProtocol, ...] = ("LL", "LL128", "Simple")
BASE_LATENCY_US = {"tree": (6.8, 14.0, 8.4), "ring": (6.6, 14.0, 8.4)}
"""Microseconds of any collective, by protocol."""
HOP_LATENCY_US = {
    "tree": {"nvlink": (0.6, 1.25, 4.0), "pci": (1.0, 1.9, 4.0), "network": (5.0, 8.5, 14.0)},
    "ring": {"nvlink": (0.6, 1.9, 3.4), "pci": (1.0, 2.5, 5.7), "network": (2.7, 4.0, 14.0)},
}
"""Microseconds of one hop, by kind of link and protocol."""
TREE_EFFICIENCY = 0.92
RING_PLATEAU_FACTOR = {False: 1.9, True: 1.4}
"""Of a ring's latency with large messages, before and from compute capability 8.0."""
TREE_CORRECTION: Mapping[NcclProtocol, Sequence[float]] = {
    "LL": (1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1, 1),
    "LL128": (1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.5, 0.6, 0.6, 0.7, 0.7, 0.8, 0.9, 0.9, 1),
    "Simple": (*(0.9,) * 7, 0.8, 0.7, 0.6, 0.6, *(0.5,) * 6, 0.6, 0.6, 0.7, 0.8, 0.9),
}
"""Of a tree's bandwidth, for messages of 64 B, 128 B, ... 128 MB."""
WIRE_EFFICIENCY = {"LL": 0.5, "LL128": 0.92, "Simple": 1.0}
"""Of the bytes on the wire: LL sends a flag with every 4 bytes, LL128 one with every 120."""


class NcclCluster(NamedTuple):
    """Nodes of GPUs. intra_node_link: kind of link in a node. node_rate: GB/s of a node's network cards together;
    intra_node_rate: GB/s of a ring inside a node; low_latency_cap: GB/s that LL reaches at most."""

    nodes: int
    gpus: int
    intra_node_link: Literal["nvlink", "pci"]
    intra_node_rate: float
    node_rate: float
    low_latency_cap: float
    compute_capability: int

    @property
    def supports_ll128(self) -> bool:
        """Return whether LL128 works: from Volta on."""
        return self.compute_capability >= 70

    @property
    def ranks(self) -> int:
        return self.nodes * self.gpus


def nccl_ring_cost(cluster: NcclCluster, protocol: NcclProtocol, size: float) -> AffineCost:
    """2(n-1) hops, of which 2(N-1) between nodes; a factor n / (2(n-1)) of the bus bandwidth.

    Latency grows by PLATEAU where Simple carries at least 4 KiB a rank over several nodes.
    """
    n, nodes, which = cluster.ranks, cluster.nodes, NCCL_PROTOCOLS.index(protocol)
    hop = HOP_LATENCY_US["ring"]
    inside, across = (2 * (n - 1) - 2 * (nodes - 1)), 2 * (nodes - 1)
    fixed = (
        BASE_LATENCY_US["ring"][which] + inside * hop[cluster.intra_node_link][which] + across * hop["network"][which]
    )
    if protocol == "Simple" and nodes > 1 and size >= n * 4096:
        fixed *= RING_PLATEAU_FACTOR[cluster.compute_capability >= 80]
    return AffineCost(fixed * 1e-6, 2 * (n - 1) / n / (_bus_rate(cluster, protocol) * 1e9))


def nccl_tree_cost(cluster: NcclCluster, protocol: NcclProtocol, size: float) -> AffineCost:
    """A chain inside each node, double binary trees across: 2((p-1) + log2 N) hops; each byte goes up and down."""
    which, hop = NCCL_PROTOCOLS.index(protocol), HOP_LATENCY_US["tree"]
    across = log2(cluster.nodes) * hop["network"][which]
    fixed = BASE_LATENCY_US["tree"][which] + 2 * ((cluster.gpus - 1) * hop[cluster.intra_node_link][which] + across)
    corrections = TREE_CORRECTION[protocol]
    rate = TREE_EFFICIENCY * _bus_rate(cluster, protocol) * corrections[min(max(int(log2(size / 64)), 0), 21)]
    return AffineCost(fixed * 1e-6, 2 / (rate * 1e9))


def nccl_best_seconds(cluster: NcclCluster, algorithm: Literal["ring", "tree"], size: float) -> float:
    """Seconds of an all-reduce of `size` bytes with the protocol that NCCL would take."""
    model = nccl_ring_cost if algorithm == "ring" else nccl_tree_cost
    usable = [protocol for protocol in NCCL_PROTOCOLS if cluster.supports_ll128 or protocol != "LL128"]
    return min(model(cluster, protocol, size)(size) for protocol in usable)


def _bus_rate(cluster: NcclCluster, protocol: NcclProtocol) -> float:
    rate = WIRE_EFFICIENCY[protocol] * (cluster.node_rate if cluster.nodes > 1 else cluster.intra_node_rate)
    return min(rate, cluster.low_latency_cap) if protocol == "LL" else rate
