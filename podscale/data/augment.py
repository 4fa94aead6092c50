"""Augmentation after the crop: RandAugment, TrivialAugment and random erasing.

All draws come from a counter-based stream keyed by (seed, epoch, sample key). They do not depend on the world size, on
threads, or on the step at which a run resumed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageEnhance, ImageOps

from podscale.config.data import AugmentSection
from podscale.data import native
from podscale.data.rng import derive_key, uniform
from podscale.errors import InputError
from podscale.util.plugins import call_plugin, find_factory, is_from_elsewhere

Rgb = tuple[int, int, int]


@dataclass(frozen=True)
class FillMode:
    """Interpolation between pixels, and the fill colour outside the image."""

    resample: Image.Resampling
    fill: Rgb


@dataclass(frozen=True)
class Operation:
    """Entry `name` of OPERATIONS; `amount` maps a level in [0, 1] to its argument, negated at random if `is_signed`."""

    name: str
    amount: Callable[[float], float] = lambda level: 0.0
    is_signed: bool = False

    def __call__(self, image: Image.Image, level: float, *, negative: bool, fill_mode: FillMode) -> Image.Image:
        amount = self.amount(level)
        return OPERATIONS[self.name](image, -amount if self.is_signed and negative else amount, fill_mode)


def _affine(image: Image.Image, matrix: tuple[float, ...], fill_mode: FillMode) -> Image.Image:
    """Copy each pixel (x, y) from (a x + b y + c, d x + e y + f); natively with the same pixels where that is there."""
    if native.can_augment():
        bicubic = fill_mode.resample == Image.Resampling.BICUBIC
        pixels = native.affine(np.asarray(image), matrix, "bicubic" if bicubic else "bilinear", fill_mode.fill)
        return Image.fromarray(pixels)
    return image.transform(image.size, Image.Transform.AFFINE, matrix, fill_mode.resample, fillcolor=fill_mode.fill)


def _rotate(image: Image.Image, degrees: float, fill_mode: FillMode) -> Image.Image:
    """Rotate around the centre with the matrix of Pillow's `rotate`, whose entries have 15 decimals."""
    angle = -math.radians(degrees % 360)
    cosine, sine = round(math.cos(angle), 15), round(math.sin(angle), 15)
    x, y = image.width / 2, image.height / 2
    across, down = cosine * -x + sine * -y + x, -sine * -x + cosine * -y + y
    return _affine(image, (cosine, sine, across, -sine, cosine, down), fill_mode)


def _sharpen(image: Image.Image, amount: float) -> Image.Image:
    """Move an image away from its smoothed form, or towards it, as Pillow's `Sharpness`."""
    if not native.can_augment():
        return ImageEnhance.Sharpness(image).enhance(1 + amount)
    return Image.blend(Image.fromarray(native.smooth(np.asarray(image))), image, 1 + amount)


def _with_bits(image: Image.Image, bits: int) -> Image.Image:
    """Keep the highest `bits` of each value. 0 bits give black, which Pillow's `posterize` refuses."""
    return image.point([value & (0xFF00 >> bits) for value in range(256)] * 3)


def _brighter_below_128(image: Image.Image, amount: float) -> Image.Image:
    table = [min(255, value + int(amount)) if value < 128 else value for value in range(256)]
    return image.point(table * 3)


OPERATIONS: Mapping[str, Callable[[Image.Image, float, FillMode], Image.Image]] = {
    "identity": lambda image, amount, fill: image,
    "autocontrast": lambda image, amount, fill: ImageOps.autocontrast(image),
    "equalize": lambda image, amount, fill: ImageOps.equalize(image),
    "invert": lambda image, amount, fill: ImageOps.invert(image),
    "rotate": _rotate,
    "shear_x": lambda image, slope, fill: _affine(image, (1, slope, 0, 0, 1, 0), fill),
    "shear_y": lambda image, slope, fill: _affine(image, (1, 0, 0, slope, 1, 0), fill),
    "translate_x": lambda image, pixels, fill: _affine(image, (1, 0, pixels, 0, 1, 0), fill),
    "translate_y": lambda image, pixels, fill: _affine(image, (1, 0, 0, 0, 1, pixels), fill),
    "translate_x_share": lambda image, share, fill: _affine(image, (1, 0, share * image.width, 0, 1, 0), fill),
    "translate_y_share": lambda image, share, fill: _affine(image, (1, 0, 0, 0, 1, share * image.height), fill),
    "color": lambda image, amount, fill: ImageEnhance.Color(image).enhance(1 + amount),
    "contrast": lambda image, amount, fill: ImageEnhance.Contrast(image).enhance(1 + amount),
    "brightness": lambda image, amount, fill: ImageEnhance.Brightness(image).enhance(1 + amount),
    "sharpness": lambda image, amount, fill: _sharpen(image, amount),
    "posterize": lambda image, bits, fill: _with_bits(image, int(bits)),
    "solarize": lambda image, threshold, fill: ImageOps.solarize(image, math.ceil(threshold)),
    "solarize_add": lambda image, amount, fill: _brighter_below_128(image, amount),
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
"""Cubuk 2019 as in timm/data/auto_augment.py, with operations that grow with the magnitude ("inc1")."""

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
"""Mueller 2021 as in torchvision's TrivialAugmentWide; the level is one of LEVELS values."""

LEVELS = 31
"""Number of strengths of TrivialAugment: 0, 1/30, ..., 1."""


RandomDraws = npt.NDArray[np.float64]

_KEY_DOMAIN = 0x6175676D  # "augm": keeps these keys apart from those of the crops
_TRIES = 10
_ERASED = (0.02, 0.33)  # limits of an erased rectangle's fraction of the area; as in torchvision
_ERASED_RATIO = (0.3, 3.3)  # limits of its height / width


class OperationDraws(NamedTuple):
    """Random draws of one operation; RandAugment makes a normal deviate of `strength` and `strength_angle`."""

    applies: float
    operation: float
    strength: float
    strength_angle: float
    sign: float
    resample: float


class PluginAugmentation(Protocol):
    """Augmentation of a plug-in; `draws` is the number of draws that it takes for an image."""

    draws: int

    def __call__(self, image: Image.Image, draws: RandomDraws) -> Image.Image:
        """Return an RGB image of the same size. Everything random follows from `draws`, float64 [draws] in [0, 1)."""
        ...


def _build_plugin(section: AugmentSection) -> PluginAugmentation | None:
    """Build the augmentation of a plug-in; None for another policy."""
    if not is_from_elsewhere(section.policy):
        return None
    plugin = find_factory("input.augment.policy", section.policy)
    built = call_plugin(plugin, options=section.options, options_field="input.augment.options")
    if not (callable(built) and isinstance(getattr(built, "draws", None), int)):
        problem = f"{plugin} returns {type(built).__name__}, which is not callable or has no number `draws`"
        raise InputError(problem, field=plugin.option, got=section.policy)
    augmentation: PluginAugmentation = built
    return augmentation


class Augmentation:
    """Augmentation of one run document; `mean` is the mean colour in [0, 1]."""

    def __init__(self, section: AugmentSection, seed: int, mean: tuple[float, float, float]) -> None:
        self._section, self._seed = section, seed
        red, green, blue = (min(255, round(255 * part)) for part in mean)
        self._mean: Rgb = (red, green, blue)
        self._plugin = _build_plugin(section)
        layers = {"trivial_augment": 1, "rand_augment": section.rand_augment.layers}.get(section.policy, 0)
        self._policy_draws = layers * len(OperationDraws._fields) if self._plugin is None else self._plugin.draws

    def draws(self, epochs: npt.NDArray[np.int64], keys: npt.NDArray[np.uint64]) -> RandomDraws:
        """Return numbers in [0, 1) for n images, float64 [n, draws per image], from their `epochs` and `keys` [n]."""
        sample = derive_key(self._seed, _KEY_DOMAIN, epochs, keys)
        count = self._policy_draws + 2 * _TRIES + 3
        return uniform(derive_key(sample[:, np.newaxis], np.arange(count)))

    def __call__(self, image: Image.Image, draws: RandomDraws) -> npt.NDArray[np.uint8]:
        """Return the augmented image, uint8 [height, width, 3]; `draws` is one row of the method `draws`."""
        pixels = np.asarray(self._apply_policy(image, draws[: self._policy_draws]))
        rectangle = _erased_rectangle(image.height, image.width, self._section.erase, draws[self._policy_draws :])
        if rectangle is not None:
            pixels = pixels.copy()
            pixels[rectangle] = self._mean
        return pixels

    def _apply_policy(self, image: Image.Image, draws: RandomDraws) -> Image.Image:
        if self._plugin is not None:
            return self._apply_plugin(self._plugin, image, draws)
        change = self._rand_augment if self._section.policy == "rand_augment" else _trivial_augment
        for layer in draws.reshape(-1, len(OperationDraws._fields)).tolist():
            image = change(image, OperationDraws(*layer))
        return image

    def _apply_plugin(self, plugin: PluginAugmentation, image: Image.Image, draws: RandomDraws) -> Image.Image:
        changed = plugin(image, draws)
        if not isinstance(changed, Image.Image) or (changed.size, changed.mode) != (image.size, "RGB"):
            problem = f"returns {changed!r} for an RGB image of {image.width}x{image.height} pixels"
            raise InputError(problem, field="input.augment.policy", got=self._section.policy)
        return changed

    def _rand_augment(self, image: Image.Image, drawn: OperationDraws) -> Image.Image:
        """Apply one operation of RandAugment, bilinear or bicubic, filled with the mean colour, as timm does."""
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
    """Apply one operation of TrivialAugment, bilinear, filled with black, as torchvision's reference training does."""
    level = int(drawn.strength * LEVELS) / (LEVELS - 1)
    operation = TRIVIAL_AUGMENT[int(drawn.operation * len(TRIVIAL_AUGMENT))]
    return operation(image, level, negative=drawn.sign < 0.5, fill_mode=FillMode(Image.Resampling.BILINEAR, (0, 0, 0)))


def _erased_rectangle(height: int, width: int, probability: float, draws: RandomDraws) -> tuple[slice, slice] | None:
    """Return rows and columns of the first of ten drawn rectangles that is smaller than the image (Zhong 2017)."""
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
