"""All-reduce algorithms that average a bucket of gradients over all ranks, chosen by the run document."""

from podscale.config.train import AllReduceSection
from podscale.errors import InputError
from podscale.pytorch.all_reduce.algorithms import (
    AllReduce,
    DoubleTreeAllReduce,
    FlatAllReduce,
    HierarchicalAllReduce,
    HybridAllReduce,
    RingAllReduce,
    ShardedAllReduce,
)
from podscale.pytorch.all_reduce.torus2d import Torus2DAllReduce, WorldTorus2DAllReduce
from podscale.pytorch.all_reduce.wire_formats import WIRE_FORMATS
from podscale.pytorch.mesh import build_line, build_mesh
from podscale.pytorch.world import World


def build_all_reduce(section: AllReduceSection, world: World) -> AllReduce:
    """Build the all-reduce of a document's all_reduce section. Every rank must call this at the same time.

    Raises the same InputError on every rank if the section does not fit the world.
    """
    if section.backend == "nccl" and not world.on_gpu:
        raise InputError(
            "this rank has no GPU",
            field="train.all_reduce.backend",
            got="nccl",
            hint="Check the driver and the job's resources, or set train.all_reduce.backend=auto to train on CPUs.",
        )
    device, row, column = world.device, WIRE_FORMATS[section.wire_row], WIRE_FORMATS[section.wire_column]
    match section.algorithm:
        case "flat":
            return FlatAllReduce(world, column)
        case "ring":
            return RingAllReduce(build_line(world), device, column)
        case "tree":
            return DoubleTreeAllReduce(build_line(world), device, column)
        case "hierarchical":
            return HierarchicalAllReduce(build_mesh(world, section.row), device, row, column)
        case "torus2d":
            torus = WorldTorus2DAllReduce if section.shard_over == "world" else Torus2DAllReduce
            return torus(build_mesh(world, section.row), device, row, column)
        case "hybrid":
            small = HierarchicalAllReduce(build_mesh(world, section.row), device, row, column)
            return HybridAllReduce(
                small, RingAllReduce(build_line(world), device, column), int(section.hybrid_mb * 2**20)
            )
        case "auto":
            raise InputError(
                "only `podscale train` chooses: it measures the links at its start, and stores the choice with the run",
                field="train.all_reduce.algorithm",
                got="auto",
                hint="Name an algorithm here (`podscale bench allreduce` measures them).",
            )
        case "ddp":
            raise AssertionError("ddp has its own buckets: see reducer.build_reducer")


__all__ = [
    "AllReduce",
    "FlatAllReduce",
    "ShardedAllReduce",
    "Torus2DAllReduce",
    "WorldTorus2DAllReduce",
    "build_all_reduce",
]
