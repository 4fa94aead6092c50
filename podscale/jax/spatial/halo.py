"""The exchange of halos: rows and columns of neighbouring tiles, as windows over an image need them."""

import jax.numpy as jnp
from jax import Array, lax

from podscale.jax.mesh import SPATIAL
from podscale.jax.spatial.tiles import Halo, Tiles, plan_halo
from podscale.models import Window


def exchange_halo(x: Array, window: Window, tiles: Tiles | None, fill: float = 0.0) -> tuple[Array, int]:
    """What the outputs of this device see of images [n, rows, columns, channels], and the padding still to come.

    Whole images (no tiles) come back as they are. Of tiles, the result has halos, and `fill` around the image, so
    that the window goes over it without padding: its outputs are this device's tile of the whole output. Columns
    follow rows, so that corners come by way of the neighbour between.
    """
    if tiles is None:
        return x, window.padding
    assert x.shape[1:3] == tiles.tile_shape, f"{x.shape} is no tile of {tiles}"
    for dim, (axis, side, parts) in enumerate(zip(SPATIAL, tiles.image_sides, tiles.parts, strict=True), start=1):
        x = _exchange_halo_along(x, dim, axis, side, plan_halo(side, parts, window), fill)
    return x, 0


def _exchange_halo_along(x: Array, dim: int, axis: str, side: int, reach: Halo, fill: float) -> Array:
    own = x.shape[dim]
    x = with_halo(x, dim, axis, reach.before, reach.after)
    first = lax.axis_index(axis) * own - reach.before
    if reach.beyond or (fill and lax.axis_size(axis) > 1):
        positions = lax.expand_dims(first + jnp.arange(x.shape[dim]), [d for d in range(x.ndim) if d != dim])
        x = jnp.where((positions >= 0) & (positions < side), x, jnp.asarray(fill, x.dtype))
    front = max(0, -min(reach.starts))
    back = max(0, max(reach.starts) + reach.rows - x.shape[dim])
    x = lax.pad(x, jnp.asarray(fill, x.dtype), [(front, back, 0) if d == dim else (0, 0, 0) for d in range(x.ndim)])
    starts = [start + front for start in reach.starts]
    if len(set(starts)) == 1:
        return lax.slice_in_dim(x, starts[0], starts[0] + reach.rows, axis=dim)
    return lax.dynamic_slice_in_dim(x, jnp.asarray(starts)[lax.axis_index(axis)], reach.rows, axis=dim)


def with_halo(x: Array, dim: int, axis: str, before: int, after: int) -> Array:
    """A tile with so many rows of the tiles before and behind it; where there is none, zeros.

    A message goes from each device to the next, or where tiles are smaller than the halo, on to those behind.
    """
    own, places = x.shape[dim], lax.axis_size(axis)
    pieces = [x]
    for hop in range(1, -(-before // own) + 1):
        count = min(own, before - (hop - 1) * own)
        edge = lax.slice_in_dim(x, own - count, own, axis=dim)
        pieces.insert(0, lax.ppermute(edge, axis, [(place, place + hop) for place in range(places - hop)]))
    for hop in range(1, -(-after // own) + 1):
        count = min(own, after - (hop - 1) * own)
        edge = lax.slice_in_dim(x, 0, count, axis=dim)
        pieces.append(lax.ppermute(edge, axis, [(place + hop, place) for place in range(places - hop)]))
    return lax.concatenate(pieces, dim) if len(pieces) > 1 else x
