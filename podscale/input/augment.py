"""What happens to a training image after its crop: RandAugment, TrivialAugment, a rectangle erased.

All is drawn from a counter-based stream keyed by (seed, epoch, sample key), so it depends neither on the world size, on
threads, nor on where a run was resumed.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

from podscale.config.data import AugmentSection
from podscale.input.operations import LEVELS, RAND_AUGMENT, TRIVIAL_AUGMENT, FillMode, Rgb
from podscale.keyed import derive_key, uniform

RandomDraws = npt.NDArray[np.float64]

_KEY_DOMAIN = 0x6175676D  # "augm": keeps these keys apart from those of the crops
_TRIES = 10
_ERASED = (0.02, 0.33)  # share of the image's area, and height / width, of an erased rectangle: torchvision's defaults
_ERASED_RATIO = (0.3, 3.3)


class OperationDraws(NamedTuple):
    """The draws of one operation; `strength` is two, of which a normal deviate takes both."""

    applies: float
    operation: float
    strength: float
    strength_angle: float
    sign: float
    resample: float


class Augmentation:
    """The changes of one document; `mean` is the mean colour, scaled to [0, 1]."""

    def __init__(self, section: AugmentSection, seed: int, mean: tuple[float, float, float]) -> None:
        self._section, self._seed = section, seed
        red, green, blue = (min(255, round(255 * part)) for part in mean)
        self._mean: Rgb = (red, green, blue)
        self._layers = {"none": 0, "trivial_augment": 1, "rand_augment": section.rand_augment.layers}[section.policy]

    def draws(self, epochs: npt.NDArray[np.int64], keys: npt.NDArray[np.uint64]) -> RandomDraws:
        """Numbers in [0, 1) for n images: float64 [n, numbers of one image]."""
        sample = derive_key(self._seed, _KEY_DOMAIN, epochs, keys)
        count = self._layers * len(OperationDraws._fields) + 2 * _TRIES + 3
        return uniform(derive_key(sample[:, np.newaxis], np.arange(count)))

    def __call__(self, image: Image.Image, draws: RandomDraws) -> npt.NDArray[np.uint8]:
        """The image after the changes that its draws name: uint8 [height, width, 3]."""
        change = self._rand_augment if self._section.policy == "rand_augment" else _trivial_augment
        end = self._layers * len(OperationDraws._fields)
        for layer in draws[:end].reshape(-1, len(OperationDraws._fields)).tolist():
            image = change(image, OperationDraws(*layer))
        pixels = np.asarray(image)
        rectangle = _erased_rectangle(image.height, image.width, self._section.erase, draws[end:])
        if rectangle is not None:
            pixels = pixels.copy()
            pixels[rectangle] = self._mean
        return pixels

    def _rand_augment(self, image: Image.Image, drawn: OperationDraws) -> Image.Image:
        """One of RandAugment's operations, bilinear or bicubic on the mean colour, as timm trains with it."""
        section = self._section.rand_augment
        if drawn.applies >= section.probability:
            return image
        radius, angle = math.sqrt(-2 * math.log(1 - drawn.strength)), 2 * math.pi * drawn.strength_angle
        magnitude = section.magnitude + section.deviation * radius * math.cos(angle)  # Box and Muller 1958
        smooth = Image.Resampling.BILINEAR if drawn.resample < 0.5 else Image.Resampling.BICUBIC
        operation = RAND_AUGMENT[int(drawn.operation * len(RAND_AUGMENT))]
        level = min(max(magnitude, 0.0), 10.0) / 10
        return operation(image, level, negative=drawn.sign < 0.5, fill_mode=FillMode(smooth, self._mean))


def _trivial_augment(image: Image.Image, drawn: OperationDraws) -> Image.Image:
    """One of TrivialAugment's operations, bilinear on black, as torchvision's reference training has it."""
    level = int(drawn.strength * LEVELS) / (LEVELS - 1)
    operation = TRIVIAL_AUGMENT[int(drawn.operation * len(TRIVIAL_AUGMENT))]
    return operation(image, level, negative=drawn.sign < 0.5, fill_mode=FillMode(Image.Resampling.BILINEAR, (0, 0, 0)))


def _erased_rectangle(height: int, width: int, probability: float, draws: RandomDraws) -> tuple[slice, slice] | None:
    """Rows and columns of the rectangle: of ten draws the first that is smaller than the image (Zhong 2017)."""
    if draws[0] >= probability:
        return None
    areas = draws[3 : 3 + _TRIES] * (_ERASED[1] - _ERASED[0]) + _ERASED[0]
    low, high = np.log(_ERASED_RATIO)
    ratios = np.exp(draws[3 + _TRIES :] * (high - low) + low)
    heights, widths = (np.rint(np.sqrt(height * width * areas * by)).astype(int) for by in (ratios, 1 / ratios))
    fits = np.flatnonzero((heights < height) & (widths < width))
    if not len(fits):
        return None
    tall, wide = int(heights[fits[0]]), int(widths[fits[0]])
    top, left = int(draws[1] * (height - tall + 1)), int(draws[2] * (width - wide + 1))
    return slice(top, top + tall), slice(left, left + wide)
