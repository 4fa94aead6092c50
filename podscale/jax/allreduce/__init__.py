"""Ways to average a bucket of gradients over all devices: one file each, chosen by the document."""

from jax.sharding import Mesh

from podscale.config.train import AllReduceSection
from podscale.errors import InputError
from podscale.jax.allreduce.base import AllReduce
from podscale.jax.allreduce.flat import FlatAllReduce
from podscale.jax.allreduce.torus2d import Torus2DAllReduce


def build_all_reduce(section: AllReduceSection, mesh: Mesh) -> AllReduce:
    """The collective of a document's all_reduce section. Raises InputError for those that this engine does not have."""
    if (section.wire_row, section.wire_column) != ("fp32", "fp32"):
        raise InputError(
            "the JAX engine averages gradients in fp32",
            field="train.all_reduce.wire_row" if section.wire_row != "fp32" else "train.all_reduce.wire_column",
            hint="Leave wire_row and wire_column at fp32.",
        )
    match section.algorithm:
        case "flat":
            return FlatAllReduce(mesh)
        case "torus2d":
            return Torus2DAllReduce(mesh)
        case other:
            raise InputError(
                "the JAX engine has flat (XLA's own) and torus2d",
                field="train.all_reduce.algorithm",
                got=other,
                hint="Choose one of them.",
            )


__all__ = ["AllReduce", "FlatAllReduce", "Torus2DAllReduce", "build_all_reduce"]
