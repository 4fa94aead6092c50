"""Part `claims`: Jia 2018 against the cost model, 3 x (AlexNet) and 11 x (ResNet-50) over NCCL on 1,024 GPUs.

The paper's words (abstract): all-reduce up to 3 and 11 times as fast as NCCL-based training. What NCCL did then is not
in what we could read; the model tries both: a ring for every tensor, and a ring for fused buckets. The cluster (P40, 8
a node on PCIe, 100 GbE) and groups of 16 are recalled from the paper, not read in it; the links' constants are those of
NCCL's own model (nccl_model.py), and beside them the lab's, as `auto` fits them.
"""

from collections.abc import Callable, Sequence

from benchmarks.network.lab import lab
from benchmarks.network.nccl_model import HOP_LATENCY_US, NcclCluster, nccl_best_seconds
from benchmarks.network.ranks import run_ranks
from benchmarks.network.setting import Setting
from podscale import models
from podscale.config import ModelSection
from podscale.hardware.collective_cost import Fabric, LinkAxis, crossover_bytes, flat, hierarchical, tree
from podscale.pytorch.all_reduce.auto import measure_fabric

GPUS = 1024
GROUP = 16
BUCKET = 64 * 2**20
P40 = NcclCluster(GPUS // 8, 8, "pci", 10, 12, 20.4, 61)
Cost = Callable[[float], float]


def claims(setting: Setting) -> None:
    """Table of the model at 1,024 ranks."""
    lines = setting.head("claims", "Jia's claim")
    lines += [
        "All-reduce of all gradients of a step at 1,024 ranks by the cost model, nothing hidden behind backward. Jia "
        "2018 reports up to 3 x (AlexNet) and 11 x (ResNet-50) over NCCL on 1,024 P40. Hybrid: tensors fused into "
        f"buckets of {BUCKET // 2**20} MiB (the paper's size is not known), hierarchical in groups of {GROUP} below "
        "the size where the ring is faster, the ring above. The model knows no time for launching a kernel.",
    ]
    with lab(setting.shape(2, 4, 100e6, 25e6, node_delay=0.5e-3)) as built:
        calibrated = run_ranks(built, measure_fabric, None)[0]
    for title, fabric, by_nccl in (
        ("P40, PCIe, 100 GbE (constants of NCCL 2.30's model, LL protocol)", p40_fabric(), True),
        ("The lab's links as measured, 64 nodes of 16 ranks", at_scale(calibrated), False),
    ):
        lines += ["", f"## {title}", "", described(fabric), "", *table(fabric, by_nccl)]
    lines += ["", *verdict()]
    setting.write("claims", lines)


def p40_fabric() -> Fabric:
    """Rows of 16 ranks span two nodes: their slowest hop is the network's; PCIe carries 10 GB/s, the card 12."""
    inside, network = (HOP_LATENCY_US["ring"][kind][0] * 1e-6 for kind in ("pci", "network"))
    hops = 2 * (GPUS - 1)
    mean = ((hops - 2 * (P40.nodes - 1)) * inside + 2 * (P40.nodes - 1) * network) / hops
    row = LinkAxis(GROUP, (14 * inside + network) / 15, 1 / 10e9)
    column = LinkAxis(GPUS // GROUP, network, GROUP / 12e9)
    return Fabric(row, column, LinkAxis(GPUS, mean, 1 / 10e9))


def at_scale(lab_fabric: Fabric) -> Fabric:
    """The lab's latencies and bandwidths in a world of 1,024 ranks, 16 a node behind the same node link."""
    row, column = lab_fabric.row, lab_fabric.column
    nodes = GPUS // GROUP
    card = column.per_byte / row.ranks  # one node's link, which all of its ranks share
    hops, across = 2 * (GPUS - 1), 2 * (nodes - 1)
    mean = ((hops - across) * row.latency + across * column.latency) / hops
    return Fabric(
        LinkAxis(GROUP, row.latency, row.per_byte),
        LinkAxis(nodes, column.latency, GROUP * card),
        LinkAxis(GPUS, mean, max(row.per_byte, card)),
    )


def described(fabric: Fabric) -> str:
    axes = {"row": fabric.row, "column": fabric.column, "ring through all": fabric.world}
    parts = [
        f"{name}: {a.ranks} ranks, {a.latency * 1e6:.3g} us, {1e-6 / a.per_byte:.4g} MB/s" for name, a in axes.items()
    ]
    where = crossover_bytes(fabric, hierarchical, flat)
    return "; ".join(parts) + f"; the ring is faster from {where / 2**20:.4g} MiB on."


def table(fabric: Fabric, by_nccl: bool) -> list[str]:
    """Rows for both networks: ring and tree, tensor by tensor and fused, the hybrid, and what it gains."""
    columns: dict[str, tuple[Cost, bool]] = {
        "ring, each tensor": (lambda size: flat(fabric, size), False),
        "ring, fused": (lambda size: flat(fabric, size), True),
        "hybrid": (lambda size: min(flat(fabric, size), hierarchical(fabric, size)), True),
        "tree, fused": (lambda size: tree(fabric, size), True),
    }
    if by_nccl:
        columns["NCCL's ring, each tensor"] = (lambda size: nccl_best_seconds(P40, "ring", size), False)
        columns["NCCL's ring, fused"] = (lambda size: nccl_best_seconds(P40, "ring", size), True)
        columns["NCCL's tree, each tensor"] = (lambda size: nccl_best_seconds(P40, "tree", size), False)
        columns["NCCL's tree, fused"] = (lambda size: nccl_best_seconds(P40, "tree", size), True)
    names = list(columns)
    lines = ["| all-reduce | " + " | ".join(f"{name}, s | hybrid gains" for name in NETWORKS) + " |"]
    lines.append("|---|" + "---:|" * (2 * len(NETWORKS)))
    for name in names:
        cells = []
        for sizes in NETWORKS.values():
            own, hybrid = (_total(*columns[which], sizes) for which in (name, "hybrid"))
            cells.append(f"{own:.4g} | {own / hybrid:.2f} x")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _total(cost: Cost, fused: bool, sizes: Sequence[int]) -> float:
    return sum(map(cost, buckets(sizes) if fused else sizes))


def buckets(sizes: Sequence[int], most: int = BUCKET) -> list[int]:
    """Bytes of the buckets, filled in order; a larger tensor gets one of its own."""
    found = [0]
    for size in sizes:
        if found[-1] and found[-1] + size > most:
            found.append(0)
        found[-1] += size
    return found


def gradient_sizes(name: str) -> list[int]:
    """Bytes of each gradient in fp32, in the order of backward."""
    spec = models.model_spec(ModelSection.model_validate({"name": name}), 1000)
    return [4 * parameter.size for parameter in reversed(spec.parameters)]


NETWORKS = {"AlexNet": gradient_sizes("alexnet"), "ResNet-50": gradient_sizes("resnet50")}


def verdict() -> list[str]:
    """Conclusion, computed from the numbers."""
    fabric = p40_fabric()
    sentences = []
    for name, claimed in (("AlexNet", 3), ("ResNet-50", 11)):
        sizes = NETWORKS[name]
        hybrid = _total(lambda size: min(flat(fabric, size), hierarchical(fabric, size)), True, sizes)
        single = sum(nccl_best_seconds(P40, "ring", size) for size in sizes) / hybrid
        fused = sum(nccl_best_seconds(P40, "ring", size) for size in buckets(sizes)) / hybrid
        today = sum(nccl_best_seconds(P40, "tree", size) for size in buckets(sizes)) / hybrid
        sentences.append(
            f"- {name}: the paper says up to {claimed} x. The model gives {single:.1f} x over NCCL's ring with a "
            f"message for every tensor, {fused:.1f} x over the same ring with fused buckets, and {today:.1f} x over "
            "NCCL's tree of today with fused buckets, on the same links."
        )
    return [
        "## What remains",
        "",
        *sentences,
        "",
        "Most of the gain over a ring of 1,024 ranks is fusion and the shorter way of small messages. Trees (NCCL 2.4, "
        "2019) have that way built in, and every framework fuses; so what the hybrid still brings over a fused tree is "
        "the last figure, and the reason to keep a grid of ranks is its halves: a sharded update.",
    ]
