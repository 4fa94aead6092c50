"""All-reduce on a grid of devices: along the rows, along the columns, along the rows (Ying 2018; Mikami 2018).

Each device reduce-scatters its bucket inside its row, all-reduces its shard along its column and gathers inside the
row again, so that a message between rows carries 1/row of the data. Where there are several slices, the step along
the column is made of the same three on a smaller scale: reduce-scatter in the column, all-reduce over the slices,
all-gather in the column. So the network between slices, the slowest, carries 1/(row x column) of the data.
"""

import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh

from podscale.jax.allreduce.collectives import all_gather, all_reduce, reduce_scatter
from podscale.jax.mesh import COLUMN, ROW, SLICES, AxisNames, axis_size


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
