"""What can be done along some axes of the mesh, each one collective of XLA's; flat arrays, inside `shard_map`."""

from jax import Array, lax

from podscale.jax.mesh import Axes


def reduce_scatter(values: Array, axes: Axes) -> Array:
    """This device's part of the sum."""
    part: Array = lax.psum_scatter(values, axes, tiled=True)
    return part


def all_reduce(values: Array, axes: Axes) -> Array:
    """The sum."""
    total: Array = lax.psum(values, axes)
    return total


def all_gather(part: Array, axes: Axes) -> Array:
    """Every device's part, in order."""
    whole: Array = lax.all_gather(part, axes, tiled=True)
    return whole
