"""Operations on a cropped image, by Pillow, and the two policies' tables of them.

An amount of 0 changes nothing, but for `posterize` and `solarize`, whose amounts are bits kept and a threshold.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from PIL import Image, ImageEnhance, ImageOps

Rgb = tuple[int, int, int]


@dataclass(frozen=True)
class FillMode:
    """How an operation that moves pixels fills in: between them, and where the image has none."""

    resample: Image.Resampling
    fill: Rgb


@dataclass(frozen=True)
class Operation:
    """`name`: of OPERATIONS. `amount`: of a level from 0 to 1. `is_signed`: the amount is taken with either sign."""

    name: str
    amount: Callable[[float], float] = lambda level: 0.0
    is_signed: bool = False

    def __call__(self, image: Image.Image, level: float, *, negative: bool, fill_mode: FillMode) -> Image.Image:
        amount = self.amount(level)
        return OPERATIONS[self.name](image, -amount if self.is_signed and negative else amount, fill_mode)


def _affine(image: Image.Image, matrix: tuple[float, ...], fill_mode: FillMode) -> Image.Image:
    """The pixel (x, y) becomes that at (a x + b y + c, d x + e y + f) of before."""
    return image.transform(image.size, Image.Transform.AFFINE, matrix, fill_mode.resample, fillcolor=fill_mode.fill)


def _with_bits(image: Image.Image, bits: int) -> Image.Image:
    """The highest bits of each value; of no bits black, which Pillow's own refuses."""
    return image.point([value & (0xFF00 >> bits) for value in range(256)] * 3)


def _brighter_below_128(image: Image.Image, amount: float) -> Image.Image:
    table = [min(255, value + int(amount)) if value < 128 else value for value in range(256)]
    return image.point(table * 3)


OPERATIONS: Mapping[str, Callable[[Image.Image, float, FillMode], Image.Image]] = {
    "identity": lambda image, amount, look: image,
    "autocontrast": lambda image, amount, look: ImageOps.autocontrast(image),
    "equalize": lambda image, amount, look: ImageOps.equalize(image),
    "invert": lambda image, amount, look: ImageOps.invert(image),
    "rotate": lambda image, degrees, look: image.rotate(degrees, look.resample, fillcolor=look.fill),
    "shear_x": lambda image, slope, look: _affine(image, (1, slope, 0, 0, 1, 0), look),
    "shear_y": lambda image, slope, look: _affine(image, (1, 0, 0, slope, 1, 0), look),
    "translate_x": lambda image, pixels, look: _affine(image, (1, 0, pixels, 0, 1, 0), look),
    "translate_y": lambda image, pixels, look: _affine(image, (1, 0, 0, 0, 1, pixels), look),
    "translate_x_share": lambda image, share, look: _affine(image, (1, 0, share * image.width, 0, 1, 0), look),
    "translate_y_share": lambda image, share, look: _affine(image, (1, 0, 0, 0, 1, share * image.height), look),
    "color": lambda image, amount, look: ImageEnhance.Color(image).enhance(1 + amount),
    "contrast": lambda image, amount, look: ImageEnhance.Contrast(image).enhance(1 + amount),
    "brightness": lambda image, amount, look: ImageEnhance.Brightness(image).enhance(1 + amount),
    "sharpness": lambda image, amount, look: ImageEnhance.Sharpness(image).enhance(1 + amount),
    "posterize": lambda image, bits, look: _with_bits(image, int(bits)),
    "solarize": lambda image, threshold, look: ImageOps.solarize(image, math.ceil(threshold)),
    "solarize_add": lambda image, amount, look: _brighter_below_128(image, amount),
}

RAND_AUGMENT: Sequence[Operation] = (
    Operation("autocontrast"),
    Operation("equalize"),
    Operation("invert"),
    Operation("rotate", lambda level: 30 * level, is_signed=True),
    Operation("posterize", lambda level: 4 - int(4 * level)),
    Operation("solarize", lambda level: 256 - int(256 * level)),
    Operation("solarize_add", lambda level: int(110 * level)),
    Operation("color", lambda level: 0.9 * level, is_signed=True),
    Operation("contrast", lambda level: 0.9 * level, is_signed=True),
    Operation("brightness", lambda level: 0.9 * level, is_signed=True),
    Operation("sharpness", lambda level: 0.9 * level, is_signed=True),
    Operation("shear_x", lambda level: 0.3 * level, is_signed=True),
    Operation("shear_y", lambda level: 0.3 * level, is_signed=True),
    Operation("translate_x_share", lambda level: 0.45 * level, is_signed=True),
    Operation("translate_y_share", lambda level: 0.45 * level, is_signed=True),
)
"""Cubuk 2019 in the form of huggingface/pytorch-image-models, timm/data/auto_augment.py, whose operations grow with
the magnitude ("inc1")."""

TRIVIAL_AUGMENT: Sequence[Operation] = (
    Operation("identity"),
    Operation("shear_x", lambda level: 0.99 * level, is_signed=True),
    Operation("shear_y", lambda level: 0.99 * level, is_signed=True),
    Operation("translate_x", lambda level: int(32 * level), is_signed=True),
    Operation("translate_y", lambda level: int(32 * level), is_signed=True),
    Operation("rotate", lambda level: 135 * level, is_signed=True),
    Operation("brightness", lambda level: 0.99 * level, is_signed=True),
    Operation("color", lambda level: 0.99 * level, is_signed=True),
    Operation("contrast", lambda level: 0.99 * level, is_signed=True),
    Operation("sharpness", lambda level: 0.99 * level, is_signed=True),
    Operation("posterize", lambda level: 8 - round(6 * level)),
    Operation("solarize", lambda level: 255 - 255 * level),
    Operation("autocontrast"),
    Operation("equalize"),
)
"""Mueller 2021 in the form of torchvision, transforms.TrivialAugmentWide; its level is one of LEVELS."""

LEVELS = 31
"""Strengths of TrivialAugment: 0, 1/30, ..., 1."""
