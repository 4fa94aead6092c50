"""Ways to average a bucket of gradients over all ranks: one file each, chosen by the document."""

from podscale.config.model import AllReduceSection
from podscale.pytorch.allreduce.base import AllReduce
from podscale.pytorch.allreduce.flat import Flat
from podscale.pytorch.allreduce.torus2d import Torus2D
from podscale.pytorch.world import World


def build_all_reduce(section: AllReduceSection, world: World) -> AllReduce:
    """The collective of a document's all_reduce section. Every rank must call this at the same time."""
    match section.algorithm:
        case "torus2d":
            return Torus2D(world, section.row or world.local_size)
        case "flat":
            return Flat(world)
        case "ddp":
            raise AssertionError("ddp brings its own buckets: see reducer.build_reducer")


__all__ = ["AllReduce", "Flat", "Torus2D", "build_all_reduce"]
