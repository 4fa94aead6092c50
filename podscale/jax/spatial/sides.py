"""How large the images of each operation are: a tile does not show it where tiles are uneven."""

from collections.abc import Callable
from typing import Any

import jax
from jax import Array

from podscale.jax.spatial.tiles import Parts, Tiles

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
