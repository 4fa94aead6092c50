"""What puts pixels together: max pool, the global average, and whole images from tiles. No tiles: whole images."""

import jax.numpy as jnp
from jax import Array, lax

from podscale.jax.mesh import SPATIAL
from podscale.jax.spatial.halo import exchange_halo
from podscale.jax.spatial.tiles import Tiles
from podscale.models import Window


def max_pool(x: Array, window: Window, tiles: Tiles | None) -> Array:
    """The largest value of each window of images [n, height, width, channels]."""
    x, padding = exchange_halo(x, window, tiles, fill=-jnp.inf)
    around = ((0, 0), (padding, padding), (padding, padding), (0, 0))
    sizes, strides = (1, window.kernel, window.kernel, 1), (1, window.stride, window.stride, 1)
    y: Array = lax.reduce_window(x, -jnp.inf, lax.max, sizes, strides, around)
    if tiles is None:
        return y
    outputs = Tiles((window.output_size(tiles.image_sides[0]), window.output_size(tiles.image_sides[1])), tiles.parts)
    return (
        y if outputs.is_even else jnp.where(outputs.inside_mask(), y, 0.0)
    )  # beyond the image there is nothing but -inf


def global_average_pool(x: Array, tiles: Tiles | None) -> Array:
    """The mean over the pixels of each image: [n, height, width, channels] -> [n, channels], the same on a group."""
    if tiles is None:
        return x.mean((1, 2))
    if not tiles.is_even:
        x = jnp.where(tiles.inside_mask(), x, 0.0)
    height, width = tiles.image_sides
    total: Array = lax.psum(x.sum((1, 2)), SPATIAL)
    return total / (height * width)


def gather_tiles(x: Array, tiles: Tiles | None) -> Array:
    """Images with all their tiles, on every device of a group."""
    if tiles is None:
        return x
    for dim, axis in enumerate(SPATIAL, start=1):
        x = lax.all_gather(x, axis, axis=dim, tiled=True)
    height, width = tiles.image_sides
    return x[:, :height, :width]
