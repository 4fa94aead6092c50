"""One photograph: its crops by the reference path and by Pillow alone, and damaged copies of it."""

import io
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from PIL import Image

from podscale.config.data import Interpolation
from podscale.config.schedule import CropSection
from podscale.data.crop import CropParams, evaluation_crops, training_crops
from podscale.data.decode import RESAMPLING, BadRecord, Pixels, crop_and_resize, decode_rows

FRACTION = 0.875
"""Fraction of the image that a crop of evaluation keeps."""
DAMAGES = ("changed bits", "changed bytes", "removed bytes", "inserted bytes", "cut short", "changed header")
_START_OF_SCAN, _END_OF_IMAGE = b"\xff\xda", b"\xff\xd9"
_SCAN_HEADER = 14
"""Bytes of the header of a scan of three components."""


@dataclass(frozen=True)
class Photograph:
    """One file, with its size as Pillow reads it, pixels."""

    record: Pixels
    height: int
    width: int

    @classmethod
    def open(cls, data: bytes) -> "Photograph":
        with Image.open(io.BytesIO(data), formats=("JPEG",)) as image:
            return cls(np.frombuffer(data, dtype=np.uint8), image.height, image.width)

    @cached_property
    def image(self) -> Image.Image | None:
        """The whole image by Pillow; None if Pillow refuses it or reads another size."""
        try:
            with Image.open(io.BytesIO(self.record.tobytes()), formats=("JPEG",)) as image:
                return image.convert("RGB") if image.size == (self.width, self.height) else None
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
            return None

    def crop_by_reference(self, crop: CropParams, size: int, interpolation: Interpolation) -> Pixels | None:
        """Return the crop of the reference path; None if it refuses the file."""
        try:
            rows = decode_rows(self.record, self.height, self.width, crop.top + crop.height)
        except BadRecord:
            return None
        return np.asarray(crop_and_resize(rows, crop, size, interpolation))

    def crop_by_pillow(self, crop: CropParams, size: int, interpolation: Interpolation) -> Pixels | None:
        """Return the crop by Pillow alone; None if Pillow refuses the file."""
        if self.image is None:
            return None
        part = self.image.crop((crop.left, crop.top, crop.left + crop.width, crop.top + crop.height))
        part = part.resize((crop.out_width, crop.out_height), RESAMPLING[interpolation])
        part = part.crop((crop.out_left, crop.out_top, crop.out_left + size, crop.out_top + size))
        return np.asarray(part.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if crop.flip else part)

    def crops(self, key: int, size: int) -> list[CropParams]:
        """Return two random crops, one of evaluation, and one of three unusual ones in turn.

        The unusual ones are a pixel at the edge, the whole image, and a padded image.
        """
        sides = np.full(2, self.width), np.full(2, self.height)
        keys = np.full(2, key, dtype=np.uint64)
        random = training_crops(0, np.arange(2), keys, *sides, crop=CropSection(), size=size)
        evaluation = evaluation_crops(*sides, size=size, fraction=FRACTION)
        unusual = [
            CropParams(self.width - 1, self.height - 1, 1, 1, size, size, 0, 0, False),
            CropParams(0, 0, self.width, self.height, size, size, 0, 0, True),
            CropParams(0, 0, self.width, self.height, size + 3, size + 5, -2, 4, False),
        ]
        return [random[0], random[1], evaluation[0], unusual[key % len(unusual)]]

    def damaged(self, number: int) -> "Photograph":
        """Return a copy with the damage of DAMAGES that `number` selects, of the same declared size."""
        return Photograph(_damage(self.record, number), self.height, self.width)


def _damage(good: Pixels, number: int) -> Pixels:
    generator, kind = np.random.default_rng(number), DAMAGES[number % len(DAMAGES)]
    scan = good.tobytes().rindex(_START_OF_SCAN)
    begin, end = (2, scan) if kind == "changed header" else (scan + _SCAN_HEADER, len(good) - len(_END_OF_IMAGE))
    at = int(generator.integers(begin, end))
    if kind == "removed bytes":
        return np.delete(good, slice(at, min(at + int(generator.integers(1, 40)), end)))
    if kind == "inserted bytes":
        return np.insert(good, at, generator.integers(0, 256, 5).astype(np.uint8))
    if kind == "cut short":
        return np.concatenate([good[:at], np.frombuffer(_END_OF_IMAGE, dtype=np.uint8)])
    damaged = good.copy()
    damaged[at] ^= 1 << int(generator.integers(8)) if kind == "changed bits" else int(generator.integers(1, 256))
    return damaged
