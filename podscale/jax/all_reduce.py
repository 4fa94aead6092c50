"""All-reduce algorithms over the devices of a mesh, inside `shard_map`: XLA's own, and the 2-D torus.

XLA's all-reduce goes along all dimensions of a TPU's torus.

The 2-D torus goes along the rows, the columns, the rows (Ying 2018; Mikami 2018). Each device reduce-scatters its
bucket inside its row, all-reduces its shard along its column and all-gathers inside the row, so a message between rows
carries 1/row of the data. With several slices, the step along the column has the same three parts: reduce-scatter in
the column, all-reduce over the slices, all-gather in the column. So the network between slices, the slowest, carries
1/(row x column) of the data.
"""

from typing import Protocol

import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh

from podscale.config.train import AllReduceSection
from podscale.errors import InputError
from podscale.jax.mesh import COLUMN, DEVICES, ROW, SLICES, AxisNames, axis_size


class AllReduce(Protocol):
    """Averages flat fp32 buckets over all devices, inside `shard_map` over the mesh, with `check_vma=False`.

    Contributions are divided by the number of devices before they are added. It can stop half way, where each device
    holds the mean of its own shard, so that an update can work on that shard alone and gather weights instead of
    gradients (Kumar 2019, section 3). Devices with the same place on `axes` hold the same shard.
    """

    axes: AxisNames
    """Mesh axes along which a bucket is scattered."""
    shards: int
    """Parts a bucket is scattered into; the length of a bucket that is cut in halves is a multiple of it."""

    def __call__(self, bucket: Array) -> Array:
        """The mean of buckets of any length, the same on each device."""
        ...

    def reduce_scatter(self, bucket: Array) -> Array:
        """This device's shard of the mean."""
        ...

    def all_gather(self, shard: Array) -> Array:
        """Every device's shard, in order; any dtype."""
        ...


LANES = 128
"""Of a TPU's memory: a flat fp32 array lies there as rows of so many elements do, in tiles of 8 rows."""


def reduce_scatter(values: Array, axes: AxisNames) -> Array:
    """This device's part of the sum.

    As rows: of a flat array the TPU compiler (libtpu 0.0.42) would make an all-reduce and drop the other parts.
    """
    in_rows = values.reshape(-1, LANES) if len(values) % (LANES * lax.axis_size(axes)) == 0 else values
    part: Array = lax.psum_scatter(in_rows, axes, tiled=True)
    return part.reshape(-1)


def all_reduce(values: Array, axes: AxisNames) -> Array:
    """The sum."""
    total: Array = lax.psum(values, axes)
    return total


def all_gather(part: Array, axes: AxisNames) -> Array:
    """Every device's part, in order."""
    whole: Array = lax.all_gather(part, axes, tiled=True)
    return whole


class FlatAllReduce:
    """One collective over the whole mesh; the shards of its halves are the devices'."""

    axes: AxisNames = DEVICES

    def __init__(self, mesh: Mesh) -> None:
        self.shards = mesh.size

    def __call__(self, bucket: Array) -> Array:
        return all_reduce(bucket / self.shards, DEVICES)

    def reduce_scatter(self, bucket: Array) -> Array:
        return reduce_scatter(bucket / self.shards, DEVICES)

    def all_gather(self, shard: Array) -> Array:
        return all_gather(shard, DEVICES)


class Torus2DAllReduce:
    """The shards of its halves are the places of the row."""

    axes: AxisNames = ROW

    def __init__(self, mesh: Mesh) -> None:
        self.shards, self._columns, self._slices = (axis_size(mesh, axes) for axes in (ROW, COLUMN, SLICES))

    def __call__(self, bucket: Array) -> Array:
        whole = _pad(bucket, self.shards)
        return self.all_gather(self.reduce_scatter(whole))[: len(bucket)]

    def reduce_scatter(self, bucket: Array) -> Array:
        share = bucket / (self.shards * self._columns * self._slices)
        return self._all_reduce_columns(reduce_scatter(share, ROW))

    def all_gather(self, shard: Array) -> Array:
        return all_gather(shard, ROW)

    def _all_reduce_columns(self, shard: Array) -> Array:
        """The sum over all rows."""
        if self._slices == 1:
            return all_reduce(shard, COLUMN)
        part = reduce_scatter(_pad(shard, self._columns), COLUMN)
        part = all_reduce(part, SLICES)
        return all_gather(part, COLUMN)[: len(shard)]


def _pad(values: Array, multiple: int) -> Array:
    """With zeros behind, up to a multiple."""
    return jnp.pad(values, (0, -len(values) % multiple))


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
