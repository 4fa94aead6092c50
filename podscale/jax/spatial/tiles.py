"""How an image is cut into tiles, and which rows of its neighbours' a device needs.

A side that the parts do not divide is cut into tiles of ceil(side / parts) rows: the last tiles reach beyond the
image or lie there altogether (7 rows in 4 parts: 2, 2, 2, 1), as in XLA's partitioner (GSPMD, Xu 2021: uneven
partitioning). What stands beyond the image is finite and otherwise of no account: who adds or compares pixels of
others masks it, so that it gets no gradient either. The alternative, to gather the images once they are small and
compute the rest on every device, would leave more than half of ResNet-50 undivided (stages of 14 and 7 rows in 4 or
8 parts), and to divide the batch there needs as many images as parts.
"""

from typing import NamedTuple

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
