"""What can be done along some axes of the mesh, each one collective of XLA's; flat arrays, inside `shard_map`."""

from jax import Array, lax

from podscale.jax.mesh import AxisNames

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
