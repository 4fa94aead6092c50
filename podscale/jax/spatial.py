"""Spatial partitioning: the devices of a group share an image, each with a tile of it (Kumar 2019).

It serves batches with fewer images than cores, or images too large for one core. Each device keeps a tile of every
activation; every device has all weights. After the global average, or the gathering, every device of a group computes
the same loss, and it differentiates the sum of these. The mean of gradients over all devices, which the all-reduce
computes, is then the gradient of the mean loss over the images.

Tiles. A side that the parts do not divide is cut into tiles of ceil(side / parts) rows: the last tiles reach beyond the
image or lie outside it (7 rows in 4 parts: 2, 2, 2, 1), as in XLA's partitioner (GSPMD, Xu 2021: uneven partitioning).
Values beyond the image are finite and otherwise arbitrary: an operation that adds or compares pixels masks them, so
they get no gradient either. The alternative, to gather the images once they are small and compute the rest on every
device, would leave more than half of ResNet-50 undivided (stages of 14 and 7 rows in 4 or 8 parts), and to divide the
batch there needs as many images as parts. A tile does not show the size of its image if tiles are uneven, so the sizes
of each operation's images are computed beforehand.

Halos. Rows and columns of neighbouring tiles are exchanged as windows over an image need them, for convolution and
pooling. Without partitioning a tile is a whole image.
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
    """Images of these sides, cut into parts over the mesh's axes `SPATIAL`."""

    image_sides: tuple[int, int]
    parts: Parts

    @property
    def tile_shape(self) -> tuple[int, int]:
        """Rows and columns of every device's tile."""
        rows, columns = (-(-side // parts) for side, parts in zip(self.image_sides, self.parts, strict=True))
        return rows, columns

    @property
    def is_even(self) -> bool:
        """Whether no tile reaches beyond the image."""
        return all(side % parts == 0 for side, parts in zip(self.image_sides, self.parts, strict=True))

    @property
    def filled_fraction(self) -> float:
        """Pixels of an image over pixels of all its tiles."""
        (height, width), (rows, columns), (down, across) = self.image_sides, self.tile_shape, self.parts
        return height * width / (rows * down * columns * across)

    def inside_mask(self) -> Array:
        """Which pixels of this device's tile belong to the image: bool [rows, columns, 1]; inside `shard_map`."""
        rows, columns = (
            lax.axis_index(axis) * length + jnp.arange(length) < side
            for axis, length, side in zip(SPATIAL, self.tile_shape, self.image_sides, strict=True)
        )
        return (rows[:, None] & columns[None, :])[..., None]


class Halo(NamedTuple):
    """What the outputs of a device's tile see along one dimension of the input."""

    before: int
    """Rows of the tiles before this one that any device needs."""
    after: int
    """Likewise of those behind."""
    starts: tuple[int, ...]
    """For each place: the first row seen, counted from the first of those `before`; may be negative."""
    rows: int
    """Rows seen."""
    beyond: bool
    """Whether an output sees rows of a tile that lie behind the image."""


def plan_halo(side: int, parts: int, window: Window) -> Halo:
    """The reach of a window over `side` rows in so many parts, outputs being cut into tiles just as the inputs are.

    Where input and output tiles are aligned (the stride divides even tiles), all devices need the same rows of their
    neighbours; elsewhere the most that any needs, and each begins at a place of its own.
    """
    outputs = window.output_size(side)
    own, of_outputs = -(-side // parts), -(-outputs // parts)
    rows = (of_outputs - 1) * window.stride + window.kernel
    firsts = [place * of_outputs * window.stride - window.padding for place in range(parts)]
    busy = [(place, first) for place, first in enumerate(firsts) if place * of_outputs < outputs]
    before = max(0, *(place * own - max(first, 0) for place, first in busy), 0)
    after = max(0, *(min(first + rows, side) - (place + 1) * own for place, first in busy), 0)
    starts = [0] * parts
    for place, first in busy:
        starts[place] = first - (place * own - before)
    for place in range(len(busy), parts):  # what these compute is of no account
        starts[place] = starts[len(busy) - 1]
    end = (outputs - 1) * window.stride - window.padding + window.kernel
    return Halo(before, after, tuple(starts), rows, side < min(end, own * parts))


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


TilesOf = Callable[[Array], Tiles | None]
"""How the images that an operation is about to work on are cut; asked once by every operation, in order."""


def no_tiles(_: Array) -> None:
    """Whole images."""


def track_tiles(network: Callable[[Array, TilesOf], Any], images: Array, parts: Parts) -> TilesOf:
    """What tells a network's operations how their images are cut, one after the other.

    images: this device's tiles. The network is first traced on whole images, without computing anything, to see the
    sides that each operation meets.
    """
    count, rows, columns, channels = images.shape
    sides: list[tuple[int, int]] = []

    def note(x: Array) -> None:
        sides.append((x.shape[1], x.shape[2]))

    uncut_images = jax.ShapeDtypeStruct((count, rows * parts[0], columns * parts[1], channels), images.dtype)
    jax.eval_shape(lambda images: network(images, note), uncut_images)
    remaining = iter(sides)
    return lambda _: Tiles(next(remaining), parts)


__all__ = [
    "Parts",
    "Tiles",
    "TilesOf",
    "exchange_halo",
    "gather_tiles",
    "global_average_pool",
    "max_pool",
    "no_tiles",
    "track_tiles",
]
