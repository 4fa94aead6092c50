"""All-reduce algorithms over the devices of a mesh, inside `shard_map`: XLA's own, and the 2-D torus.

XLA's all-reduce goes along all dimensions of a TPU's torus.

The 2-D torus goes along the rows, the columns, the rows (Ying 2018; Mikami 2018). Each device reduce-scatters its
bucket inside its row, all-reduces its shard along its column and all-gathers inside the row, so a message between rows
carries 1/row of the data. With several slices, the step along the column has the same three parts: reduce-scatter in
the column, all-reduce over the slices, all-gather in the column. So the network between slices, the slowest, carries
1/(row x column) of the data. A step that is sharded over all devices has a reduce-scatter along each of these axes in
turn, and gathers weights in the reverse order.
"""

from typing import Protocol

import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh

from podscale.config.train import AllReduceSection
from podscale.errors import InputError
from podscale.jax.mesh import COLUMN, DEVICES, ROW, SLICES, AxisNames, axis_size


class AllReduce(Protocol):
    """Average of flat fp32 buckets over all devices, inside `shard_map` over the mesh, with `check_vma=False`.

    Contributions are divided by the number of devices before they are added. A sharded optimizer step uses its two
    halves: each device steps the weights of its shard, and weights are gathered instead of gradients (Kumar 2019;
    Xu 2020). Devices with the same index along `axes` hold the same shard.
    """

    axes: AxisNames
    """Mesh axes along which a bucket is scattered."""
    shards: int
    """Number of shards of a bucket. It divides the length of a bucket that is scattered."""

    def __call__(self, bucket: Array) -> Array:
        """Return the mean of `bucket`, fp32 [elements] of any length, the same on each device."""
        ...

    def reduce_scatter(self, bucket: Array) -> Array:
        """Return this device's shard of the mean of `bucket`, fp32 [elements / shards]."""
        ...

    def all_gather(self, shard: Array) -> Array:
        """Return the concatenation of every device's `shard` [elements / shards], in order; any dtype."""
        ...


LANES = 128
"""Elements in a row of a TPU's memory, which holds a flat fp32 array in tiles of 8 rows."""


def reduce_scatter(values: Array, axes: AxisNames) -> Array:
    """Return this device's part of the sum of flat `values` over `axes`.

    Scatters rows, because the TPU compiler (libtpu 0.0.42) would turn the reduce-scatter of a flat array into an
    all-reduce.
    """
    rows = values.reshape(-1, LANES) if len(values) % (LANES * lax.axis_size(axes)) == 0 else values
    part: Array = lax.psum_scatter(rows, axes, tiled=True)
    return part.reshape(-1)


class FlatAllReduce(AllReduce):
    """One collective over the mesh, with one shard for each device."""

    axes: AxisNames = DEVICES

    def __init__(self, mesh: Mesh) -> None:
        self.shards = mesh.size

    def __call__(self, bucket: Array) -> Array:
        return lax.psum(bucket / self.shards, DEVICES)  # type: ignore[no-any-return]

    def reduce_scatter(self, bucket: Array) -> Array:
        return reduce_scatter(bucket / self.shards, DEVICES)

    def all_gather(self, shard: Array) -> Array:
        return lax.all_gather(shard, DEVICES, tiled=True)  # type: ignore[no-any-return]


class Torus2DAllReduce(AllReduce):
    """2-D torus, with one shard for each device of a row."""

    axes: AxisNames = ROW

    def __init__(self, mesh: Mesh) -> None:
        self._row, self._columns, self._slices = (axis_size(mesh, axes) for axes in (ROW, COLUMN, SLICES))
        self._devices, self.shards = mesh.size, self._row

    def __call__(self, bucket: Array) -> Array:
        total: Array = lax.all_gather(self._average_part(_pad(bucket, self._row)), ROW, tiled=True)
        return total[: len(bucket)]

    def reduce_scatter(self, bucket: Array) -> Array:
        return self._average_part(bucket)

    def all_gather(self, shard: Array) -> Array:
        return lax.all_gather(shard, ROW, tiled=True)  # type: ignore[no-any-return]

    def _average_part(self, bucket: Array) -> Array:
        """Return this device's part in its row of the mean of `bucket`."""
        return self._all_reduce_columns(reduce_scatter(bucket / self._devices, ROW))

    def _all_reduce_columns(self, shard: Array) -> Array:
        """Return the sum over all rows of all slices."""
        if self._slices == 1:
            return lax.psum(shard, COLUMN)  # type: ignore[no-any-return]
        part = lax.psum(reduce_scatter(_pad(shard, self._columns), COLUMN), SLICES)
        total: Array = lax.all_gather(part, COLUMN, tiled=True)
        return total[: len(shard)]


class WorldTorus2DAllReduce(Torus2DAllReduce):
    """2-D torus with one shard for each device: those of a row are cut along the column, and then over the slices."""

    axes: AxisNames = (*ROW, *COLUMN, *SLICES)

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh)
        self.shards = self._devices

    def reduce_scatter(self, bucket: Array) -> Array:
        part = bucket / self._devices
        for axes in (ROW, COLUMN, SLICES):
            part = reduce_scatter(part, axes)
        return part

    def all_gather(self, shard: Array) -> Array:
        for axes in (SLICES, COLUMN, ROW):
            shard = lax.all_gather(shard, axes, tiled=True)
        return shard


def _pad(values: Array, multiple: int) -> Array:
    """Pad with zeros to a multiple."""
    return jnp.pad(values, (0, -len(values) % multiple))


def build_all_reduce(section: AllReduceSection, mesh: Mesh) -> AllReduce:
    """Build the all-reduce of a document. Raises InputError for options that this engine does not support."""
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
            return WorldTorus2DAllReduce(mesh) if section.shard_over == "world" else Torus2DAllReduce(mesh)
        case other:
            raise InputError(
                "the JAX engine has flat (XLA's own) and torus2d",
                field="train.all_reduce.algorithm",
                got=other,
                hint="Choose one of them.",
            )
