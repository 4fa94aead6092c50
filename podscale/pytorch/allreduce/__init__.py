"""Ways to average a bucket of gradients over all ranks: one file each, chosen by the document."""

from podscale.config.model import AllReduceSection
from podscale.errors import InputError
from podscale.pytorch.allreduce.base import WIRES, AllReduce, HalvedAllReduce
from podscale.pytorch.allreduce.flat import Flat
from podscale.pytorch.allreduce.hierarchical import Hierarchical
from podscale.pytorch.allreduce.hybrid import Hybrid
from podscale.pytorch.allreduce.ring import Ring
from podscale.pytorch.allreduce.torus2d import Torus2D
from podscale.pytorch.allreduce.tree import Tree
from podscale.pytorch.world import World


def build_all_reduce(section: AllReduceSection, world: World) -> AllReduce:
    """The collective of a document's all_reduce section. Every rank must call this at the same time.

    Raises InputError, the same on every rank, where the section does not fit the world.
    """
    if section.backend == "nccl" and not world.on_gpu:
        raise InputError(
            "this rank has no GPU",
            field="train.all_reduce.backend",
            got="nccl",
            hint="Check the driver and the job's resources, or set train.all_reduce.backend=auto to train on CPUs.",
        )
    device, row, column = world.device, WIRES[section.wire_row], WIRES[section.wire_column]
    match section.algorithm:
        case "flat":
            return Flat(world, column)
        case "ring":
            return Ring(world.line(), device, column)
        case "tree":
            return Tree(world.line(), device, column)
        case "hierarchical":
            return Hierarchical(world.mesh(section.row), device, row, column)
        case "torus2d":
            return Torus2D(world.mesh(section.row), device, row, column)
        case "hybrid":
            small = Hierarchical(world.mesh(section.row), device, row, column)
            return Hybrid(small, Ring(world.line(), device, column), int(section.hybrid_mb * 2**20))
        case "auto":
            raise InputError(
                "the choice is made when `podscale train` starts and is kept with the run",
                field="train.all_reduce.algorithm",
                got="auto",
                hint="Name an algorithm here (`podscale bench allreduce` measures them).",
            )
        case "ddp":
            raise AssertionError("ddp brings its own buckets: see reducer.build_reducer")


__all__ = [
    "AllReduce",
    "Flat",
    "HalvedAllReduce",
    "Hierarchical",
    "Hybrid",
    "Ring",
    "Torus2D",
    "Tree",
    "build_all_reduce",
]
