"""Cost model by which NCCL chooses between ring and tree; not a measurement.

Formulas and latencies of NVIDIA/nccl 2.30.7, src/graph/tuning.cc. The correction of the tree by message size is that
of 2.8 (the sizes from 256 MB on are newer).
"""

from collections.abc import Mapping, Sequence
from math import log2
from typing import Literal, NamedTuple

from podscale.hardware.collective_cost import AffineCost

NcclProtocol = Literal["LL", "LL128", "Simple"]
NCCL_PROTOCOLS: tuple[NcclProtocol, ...] = ("LL", "LL128", "Simple")
BASE_LATENCY_US = {"tree": (6.8, 14.0, 8.4), "ring": (6.6, 14.0, 8.4)}
"""Base latency of a collective, microseconds, by protocol."""
HOP_LATENCY_US = {
    "tree": {"nvlink": (0.6, 1.25, 4.0), "pci": (1.0, 1.9, 4.0), "network": (5.0, 8.5, 14.0)},
    "ring": {"nvlink": (0.6, 1.9, 3.4), "pci": (1.0, 2.5, 5.7), "network": (2.7, 4.0, 14.0)},
}
"""Latency of one hop, microseconds, by kind of link and protocol."""
TREE_EFFICIENCY = 0.92
RING_PLATEAU_FACTOR = {False: 1.9, True: 1.4}
"""Factor of a ring's latency with large messages, before and from compute capability 8.0."""
TREE_CORRECTION: Mapping[NcclProtocol, Sequence[float]] = {
    "LL": (1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1, 1),
    "LL128": (1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.5, 0.6, 0.6, 0.7, 0.7, 0.8, 0.9, 0.9, 1),
    "Simple": (*(0.9,) * 7, 0.8, 0.7, 0.6, 0.6, *(0.5,) * 6, 0.6, 0.6, 0.7, 0.8, 0.9),
}
"""Factor of a tree's bandwidth, for messages of 64 B, 128 B, ... 128 MB."""
WIRE_EFFICIENCY = {"LL": 0.5, "LL128": 0.92, "Simple": 1.0}
"""Payload per byte on the wire: LL sends a flag with every 4 bytes, LL128 one with every 120."""


class NcclCluster(NamedTuple):
    """Nodes of GPUs.

    Args:
        gpus: GPUs of a node.
        intra_node_rate: bandwidth of a ring inside a node, GB/s.
        node_rate: bandwidth of a node's network cards together, GB/s.
        low_latency_cap: largest bandwidth of the LL protocol, GB/s.
        compute_capability: ten times its version, such as 80.
    """

    nodes: int
    gpus: int
    intra_node_link: Literal["nvlink", "pci"]
    intra_node_rate: float
    node_rate: float
    low_latency_cap: float
    compute_capability: int

    @property
    def supports_ll128(self) -> bool:
        """True from Volta on."""
        return self.compute_capability >= 70

    @property
    def ranks(self) -> int:
        return self.nodes * self.gpus


def nccl_ring_cost(cluster: NcclCluster, protocol: NcclProtocol, size: float) -> AffineCost:
    """Cost of a ring: 2(n-1) hops, of which 2(N-1) between nodes; a factor n / (2(n-1)) of the bus bandwidth.

    Latency grows by RING_PLATEAU_FACTOR if Simple carries at least 4 KiB a rank over several nodes.
    """
    n, nodes, column = cluster.ranks, cluster.nodes, NCCL_PROTOCOLS.index(protocol)
    link, network = (HOP_LATENCY_US["ring"][kind][column] for kind in (cluster.intra_node_link, "network"))
    fixed = BASE_LATENCY_US["ring"][column] + 2 * (n - nodes) * link + 2 * (nodes - 1) * network
    if protocol == "Simple" and nodes > 1 and size >= n * 4096:
        fixed *= RING_PLATEAU_FACTOR[cluster.compute_capability >= 80]
    return AffineCost(fixed * 1e-6, 2 * (n - 1) / n / (_bus_rate(cluster, protocol) * 1e9))


def nccl_tree_cost(cluster: NcclCluster, protocol: NcclProtocol, size: float) -> AffineCost:
    """Cost of chains inside nodes and double binary trees across: 2((p-1) + log2 N) hops; bytes go up and down."""
    column, hop = NCCL_PROTOCOLS.index(protocol), HOP_LATENCY_US["tree"]
    across = log2(cluster.nodes) * hop["network"][column]
    fixed = BASE_LATENCY_US["tree"][column] + 2 * ((cluster.gpus - 1) * hop[cluster.intra_node_link][column] + across)
    corrections = TREE_CORRECTION[protocol]
    rate = TREE_EFFICIENCY * _bus_rate(cluster, protocol) * corrections[min(max(int(log2(size / 64)), 0), 21)]
    return AffineCost(fixed * 1e-6, 2 / (rate * 1e9))


def nccl_best_seconds(cluster: NcclCluster, algorithm: Literal["ring", "tree"], size: float) -> float:
    """Return the seconds of an all-reduce of `size` bytes with the protocol that NCCL would choose."""
    model = nccl_ring_cost if algorithm == "ring" else nccl_tree_cost
    usable = [protocol for protocol in NCCL_PROTOCOLS if cluster.supports_ll128 or protocol != "LL128"]
    return min(model(cluster, protocol, size)(size) for protocol in usable)


def _bus_rate(cluster: NcclCluster, protocol: NcclProtocol) -> float:
    rate = WIRE_EFFICIENCY[protocol] * (cluster.node_rate if cluster.nodes > 1 else cluster.intra_node_rate)
    return min(rate, cluster.low_latency_cap) if protocol == "LL" else rate
