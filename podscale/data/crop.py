"""Crop parameters of training and evaluation images: rectangle, output size, mirroring.

Training crops come from a counter-based stream keyed by (seed, epoch, sample key). They do not depend on the world
size, on workers, on the step at which a run resumed, or on the loader.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from podscale.config.schedule import CropSection
from podscale.data.rng import derive_key, uniform

IntArray = npt.NDArray[np.int64]

_KEY_DOMAIN = 0x63726F70  # "crop": keeps these keys apart from those of the sample order
_FILTER_DOMAIN = 0x66696C74  # "filt": keeps the draws of filters apart from those of the crops
_TRIES = 10


class CropParams(NamedTuple):
    """Crop of one image; see `CropParamsBatch`."""

    left: int
    top: int
    width: int
    height: int
    out_width: int
    out_height: int
    out_left: int
    out_top: int
    flip: bool


@dataclass(frozen=True)
class CropParamsBatch:
    """Crops of n images; all int64 [n] in pixels, except `flip`, bool [n].

    A loader cuts the rectangle (left, top, width, height), resizes it to (out_width, out_height), cuts the square of
    its image size at (out_left, out_top), and mirrors it if `flip`. The square may extend beyond the resized image; it
    is black there.
    """

    left: IntArray
    top: IntArray
    width: IntArray
    height: IntArray
    out_width: IntArray
    out_height: IntArray
    out_left: IntArray
    out_top: IntArray
    flip: npt.NDArray[np.bool_]

    def __getitem__(self, slot: int) -> CropParams:
        return CropParams(*(getattr(self, name)[slot].item() for name in CropParams._fields))


def training_crops(
    seed: int,
    epochs: IntArray,
    keys: npt.NDArray[np.uint64],
    widths: IntArray,
    heights: IntArray,
    *,
    crop: CropSection,
    size: int,
) -> CropParamsBatch:
    """Return random rectangles by `crop.scale` and `crop.ratio`, each resized to a square of `size` pixels.

    With `crop.short_side`, they are squares of that fraction of the short side: the same as cutting `size` out of an
    image resized to a short side of size / fraction. With `crop.padding`, they are random squares of the whole image,
    resized to a short side of `size` and padded.

    Args:
        epochs: int64 [n], number of earlier uses of each sample.
        keys: uint64 [n], key of each sample.
        widths: int64 [n], pixels.
        heights: int64 [n], pixels.
    """
    sample = derive_key(seed, _KEY_DOMAIN, epochs, keys)
    draws = uniform(derive_key(sample[:, np.newaxis], np.arange(2 * _TRIES + 3)))
    random_left, random_top, mirror = (draws[:, 2 * _TRIES + i] for i in range(3))
    flip = mirror < crop.flip
    if crop.padding is not None:
        return _padded_crops(widths, heights, random_left, random_top, flip, size=size, padding=crop.padding)
    if crop.short_side is None:
        width, height, fits = _random_rectangles(draws, widths, heights, crop)
    else:
        width = height = np.maximum(_round_to_int(crop.short_side * np.minimum(widths, heights)), 1)
        fits = np.full(len(keys), True)
    free_x, free_y = widths - width, heights - height
    left = np.where(fits, (random_left * (free_x + 1)).astype(np.int64), free_x // 2)
    top = np.where(fits, (random_top * (free_y + 1)).astype(np.int64), free_y // 2)
    target, zero = np.full(len(keys), size), np.zeros(len(keys), dtype=np.int64)
    return CropParamsBatch(left, top, width, height, target, target, zero, zero, flip)


def random_filters(seed: int, epochs: IntArray, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
    """Return for each crop True, for bicubic, or False, for bilinear, both with probability 1/2.

    `epochs` and `keys` are those of `training_crops`.
    """
    is_bicubic: npt.NDArray[np.bool_] = uniform(derive_key(seed, _FILTER_DOMAIN, epochs, keys)) < 0.5
    return is_bicubic


def _padded_crops(
    widths: IntArray,
    heights: IntArray,
    random_left: npt.NDArray[np.float64],
    random_top: npt.NDArray[np.float64],
    flip: npt.NDArray[np.bool_],
    *,
    size: int,
    padding: int,
) -> CropParamsBatch:
    """Return random squares of images resized to a short side of `size` and padded by `padding`, both in pixels.

    As torchvision's Resize and RandomCrop, and TensorFlow's resize_image_with_crop_or_pad and random_crop. Draws are in
    [0, 1); all arrays [n].
    """
    out_width, out_height = _resized_to_short_side(widths, heights, size)
    free_x, free_y = out_width - size + 2 * padding, out_height - size + 2 * padding
    out_left = (random_left * (free_x + 1)).astype(np.int64) - padding
    out_top = (random_top * (free_y + 1)).astype(np.int64) - padding
    zero = np.zeros(len(widths), dtype=np.int64)
    return CropParamsBatch(zero, zero, widths, heights, out_width, out_height, out_left, out_top, flip)


def _random_rectangles(
    draws: npt.NDArray[np.float64], widths: IntArray, heights: IntArray, crop: CropSection
) -> tuple[IntArray, IntArray, npt.NDArray[np.bool_]]:
    """Return the first of ten drawn rectangles that fits into the image, else the largest with an allowed ratio.

    Random area and aspect ratio: Szegedy et al. 2015, section 6, with torchvision's limits and fallback. Returns
    widths, heights, and a mask of the images for which a draw fits (the other rectangles are centred).
    """
    area = draws[:, :_TRIES] * (crop.scale[1] - crop.scale[0]) + crop.scale[0]
    low, high = np.log(crop.ratio)
    ratio = np.exp(draws[:, _TRIES : 2 * _TRIES] * (high - low) + low)
    pixels = area * (widths * heights)[:, np.newaxis]
    tried_widths, tried_heights = _round_to_int(np.sqrt(pixels * ratio)), _round_to_int(np.sqrt(pixels / ratio))
    fits = (tried_widths <= widths[:, np.newaxis]) & (tried_heights <= heights[:, np.newaxis])
    fits &= (tried_widths > 0) & (tried_heights > 0)
    chosen = np.argmax(fits, axis=1)
    any_fits: npt.NDArray[np.bool_] = np.any(fits, axis=1)
    every = np.arange(len(draws))
    fallback_widths, fallback_heights = _largest_centred(widths, heights, crop.ratio)
    width = np.where(any_fits, tried_widths[every, chosen], fallback_widths)
    height = np.where(any_fits, tried_heights[every, chosen], fallback_heights)
    return width, height, any_fits


def evaluation_crops(widths: IntArray, heights: IntArray, *, size: int, fraction: float) -> CropParamsBatch:
    """Return the centre square of `size` pixels, of images resized to a short side of round(size / fraction).

    All loaders get the sizes from here, because libraries round the long side differently. As in torchvision, it is
    rounded down, and the centre is rounded half to even. `widths` and `heights` are pixels, int64 [n].
    """
    out_width, out_height = _resized_to_short_side(widths, heights, max(size, round(size / fraction)))
    zero = np.zeros(len(widths), dtype=np.int64)
    out_left, out_top = _round_to_int((out_width - size) / 2), _round_to_int((out_height - size) / 2)
    flip = np.zeros(len(widths), dtype=np.bool_)
    return CropParamsBatch(zero, zero, widths, heights, out_width, out_height, out_left, out_top, flip)


def _resized_to_short_side(widths: IntArray, heights: IntArray, short: int) -> tuple[IntArray, IntArray]:
    """Return widths and heights of images resized to a short side of `short` pixels; the long side is rounded down."""
    smaller = np.minimum(widths, heights)
    return short * widths // smaller, short * heights // smaller


def _largest_centred(widths: IntArray, heights: IntArray, ratio: tuple[float, float]) -> tuple[IntArray, IntArray]:
    """Return width and height of the largest rectangle with an allowed ratio."""
    low, high = ratio
    ratios = widths / heights
    width = np.where(ratios > high, np.maximum(_round_to_int(heights * high), 1), widths)
    height = np.where(ratios < low, np.maximum(_round_to_int(widths / low), 1), heights)
    return width, height


def _round_to_int(values: npt.NDArray[np.floating]) -> IntArray:
    rounded: IntArray = np.rint(values).astype(np.int64)
    return rounded
