"""Spatial partitioning: the devices of a group share an image, each with a tile of it (Kumar 2019).

It serves batches with fewer images than cores, or images too large for one core. Each device keeps a tile of every
activation; every device has all weights. After `global_average_pool` or `gather_tiles`, every device of a group
computes the same loss, and its gradient is that of the sum of the group's losses. The mean of gradients over all
devices, which the all-reduce computes, is then the gradient of the mean loss over the images.

Tiles. A side that the parts do not divide is cut into tiles of ceil(side / parts) rows: the last tiles extend beyond
the image or lie outside it (7 rows in 4 parts: 2, 2, 2, 1), as in XLA's partitioner (GSPMD, Xu 2021: uneven
partitioning). Values beyond the image are finite and otherwise arbitrary: an operation that adds or compares pixels
masks them, so they get no gradient either. The alternative, to gather the images once they are small and compute the
rest on every device, would leave more than half of ResNet-50 undivided (stages of 14 and 7 rows in 4 or 8 parts). To
divide the batch there instead would need as many images as parts. If tiles are uneven, the size of the image does not
follow from that of a tile, so `track_tiles` computes the sizes for every operation beforehand.

Halos. Before a convolution or a pooling, devices exchange the rows and columns of neighbouring tiles that its windows
need. Without partitioning a tile is a whole image.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from podscale.jax.mesh import SPATIAL
from podscale.models import Window

Parts = tuple[int, int]
"""Devices along the height and along the width of an image."""


class Tiles(NamedTuple):
    """Tiles of images, cut into `parts` over the mesh's axes `SPATIAL`. `image_sides` are height and width, pixels."""

    image_sides: tuple[int, int]
    parts: Parts

    @property
    def tile_shape(self) -> tuple[int, int]:
        """Rows and columns of every device's tile."""
        rows, columns = (-(-side // parts) for side, parts in zip(self.image_sides, self.parts, strict=True))
        return rows, columns

    @property
    def is_even(self) -> bool:
        """True if no tile extends beyond the image."""
        return all(side % parts == 0 for side, parts in zip(self.image_sides, self.parts, strict=True))

    @property
    def filled_fraction(self) -> float:
        """Pixels of an image divided by the pixels of all its tiles; 1 if tiles are even."""
        (height, width), (rows, columns), (down, across) = self.image_sides, self.tile_shape, self.parts
        return height * width / (rows * down * columns * across)

    def inside_mask(self) -> Array:
        """Return True for the pixels of this device's tile inside the image, bool [rows, columns, 1]."""
        rows, columns = (
            lax.axis_index(axis) * length + jnp.arange(length) < side
            for axis, length, side in zip(SPATIAL, self.tile_shape, self.image_sides, strict=True)
        )
        return (rows[:, None] & columns[None, :])[..., None]


class Halo(NamedTuple):
    """Input rows (or columns) that the outputs of a tile depend on, along one dimension. Equal on all devices.

    Args:
        before: rows of the tiles before this one that any device needs.
        after: rows of the tiles after this one that any device needs.
        starts: first row that each device's outputs need, counted from the first row of `before`; may be negative.
        rows: number of rows that a device's outputs need.
        needs_mask: an output depends on rows of a tile that lie beyond the image, which must be masked.
    """

    before: int
    after: int
    starts: tuple[int, ...]
    rows: int
    needs_mask: bool


def plan_halo(side: int, parts: int, window: Window) -> Halo:
    """Plan the halo of a window over `side` rows. Inputs and outputs are cut into the same number of tiles.

    If input and output tiles are aligned (tiles are even and the stride divides them), all devices need the same rows
    of their neighbours. Otherwise all devices exchange the most that any of them needs, and each starts at its own row.
    """
    outputs = window.output_size(side)
    tile, output_tile = -(-side // parts), -(-outputs // parts)
    rows = (output_tile - 1) * window.stride + window.kernel
    firsts = [index * output_tile * window.stride - window.padding for index in range(parts)]
    used = [(index, first) for index, first in enumerate(firsts) if index * output_tile < outputs]  # not idle
    before = max(0, *(index * tile - max(first, 0) for index, first in used), 0)
    after = max(0, *(min(first + rows, side) - (index + 1) * tile for index, first in used), 0)
    starts = [first - (index * tile - before) for index, first in used]
    starts += [starts[-1]] * (parts - len(used))  # tiles outside the image: nothing uses their outputs
    end = (outputs - 1) * window.stride - window.padding + window.kernel
    return Halo(before, after, tuple(starts), rows, side < min(end, tile * parts))


def exchange_halo(x: Array, window: Window, tiles: Tiles | None, fill: float = 0.0) -> tuple[Array, int]:
    """Extend tiles `x` [n, rows, columns, channels] by what a window needs. Also returns the padding still to apply.

    Tiles get halos, and `fill` around the image, so that the window's outputs without padding are this device's tile
    of the output. Rows are exchanged first and columns second, so corners arrive through the neighbour in between.
    Images that are not cut (`tiles` is None) are returned unchanged.
    """
    if tiles is None:
        return x, window.padding
    assert x.shape[1:3] == tiles.tile_shape, f"{x.shape} is no tile of {tiles}"
    for dim, (axis, side, parts) in enumerate(zip(SPATIAL, tiles.image_sides, tiles.parts, strict=True), start=1):
        x = _exchange_halo_along(x, dim, axis, side, plan_halo(side, parts, window), fill)
    return x, 0


def _exchange_halo_along(x: Array, dim: int, axis: str, side: int, halo: Halo, fill: float) -> Array:
    first = lax.axis_index(axis) * x.shape[dim] - halo.before
    x = with_halo(x, dim, axis, halo.before, halo.after)
    if halo.needs_mask or (fill and lax.axis_size(axis) > 1):  # `with_halo` leaves zeros at the ends
        positions = lax.expand_dims(first + jnp.arange(x.shape[dim]), [d for d in range(x.ndim) if d != dim])
        x = jnp.where((positions >= 0) & (positions < side), x, jnp.asarray(fill, x.dtype))
    front = max(0, -min(halo.starts))
    back = max(0, max(halo.starts) + halo.rows - x.shape[dim])
    x = lax.pad(x, jnp.asarray(fill, x.dtype), [(front, back, 0) if d == dim else (0, 0, 0) for d in range(x.ndim)])
    starts = [start + front for start in halo.starts]
    if len(set(starts)) == 1:
        return lax.slice_in_dim(x, starts[0], starts[0] + halo.rows, axis=dim)
    return lax.dynamic_slice_in_dim(x, jnp.asarray(starts)[lax.axis_index(axis)], halo.rows, axis=dim)


def with_halo(x: Array, dim: int, axis: str, before: int, after: int) -> Array:
    """Extend a tile `x` along `dim` by rows of the tiles before and after it, or by zeros at the ends of the axis.

    Rows come from the next device, and from further ones if tiles are smaller than the halo.
    """
    tile, devices = x.shape[dim], lax.axis_size(axis)
    pieces = [x]
    for hop in range(1, -(-before // tile) + 1):
        count = min(tile, before - (hop - 1) * tile)
        edge = lax.slice_in_dim(x, tile - count, tile, axis=dim)
        pieces.insert(0, lax.ppermute(edge, axis, [(index, index + hop) for index in range(devices - hop)]))
    for hop in range(1, -(-after // tile) + 1):
        count = min(tile, after - (hop - 1) * tile)
        edge = lax.slice_in_dim(x, 0, count, axis=dim)
        pieces.append(lax.ppermute(edge, axis, [(index + hop, index) for index in range(devices - hop)]))
    return lax.concatenate(pieces, dim) if len(pieces) > 1 else x


def max_pool(x: Array, window: Window, tiles: Tiles | None) -> Array:
    """Return the largest value of each window of images `x` [n, height, width, channels]."""
    x, padding = exchange_halo(x, window, tiles, fill=-jnp.inf)
    around = ((0, 0), (padding, padding), (padding, padding), (0, 0))
    sizes, strides = (1, window.kernel, window.kernel, 1), (1, window.stride, window.stride, 1)
    y: Array = lax.reduce_window(x, -jnp.inf, lax.max, sizes, strides, around)
    if tiles is None:
        return y
    outputs = Tiles((window.output_size(tiles.image_sides[0]), window.output_size(tiles.image_sides[1])), tiles.parts)
    return y if outputs.is_even else jnp.where(outputs.inside_mask(), y, 0.0)  # the maximum is -inf beyond the image


def global_average_pool(x: Array, tiles: Tiles | None) -> Array:
    """Average the pixels of images `x` [n, height, width, channels] to [n, channels], equal on a group's devices."""
    if tiles is None:
        return x.mean((1, 2))
    if not tiles.is_even:
        x = jnp.where(tiles.inside_mask(), x, 0.0)
    height, width = tiles.image_sides
    total: Array = lax.psum(x.sum((1, 2)), SPATIAL)
    return total / (height * width)


def gather_tiles(x: Array, tiles: Tiles | None) -> Array:
    """Gather all tiles `x` of the images on every device of a group."""
    if tiles is None:
        return x
    for dim, axis in enumerate(SPATIAL, start=1):
        x = lax.all_gather(x, axis, axis=dim, tiled=True)
    height, width = tiles.image_sides
    return x[:, :height, :width]


TilesOf = Callable[[Array], Tiles | None]
"""Returns the tiles of an operation's input, or None. Each operation calls it once, in order."""


def no_tiles(x: Array) -> None:
    """Return None: images `x` are not cut into tiles."""


def track_tiles(network: Callable[[Array, TilesOf], Any], images: Array, parts: Parts) -> TilesOf:
    """Return a function that returns the tiles of each operation's images, in the order of a network's operations.

    Traces the network on uncut images, without computing anything, to record the sides that each operation sees.
    `images` are this device's tiles.
    """
    count, rows, columns, channels = images.shape
    sides: list[tuple[int, int]] = []

    def record_sides(x: Array) -> None:
        sides.append((x.shape[1], x.shape[2]))

    uncut_images = jax.ShapeDtypeStruct((count, rows * parts[0], columns * parts[1], channels), images.dtype)
    jax.eval_shape(lambda images: network(images, record_sides), uncut_images)
    remaining = iter(sides)
    return lambda _: Tiles(next(remaining), parts)
