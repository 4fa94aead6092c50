"""Crops of JPEGs by the native extension (native/), with the pixels of the installed Pillow to the bit.

The extension decodes sequential JPEGs in gray and in YCbCr 4:4:4, 4:2:2 and 4:2:0. It refuses all others, and damaged
ones; the reference path (`podscale.data.decode`) decodes those. Its absence costs time and never changes pixels.
"""

import importlib
import io
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import PIL
from PIL import Image, ImageFilter

from podscale.config.data import Interpolation
from podscale.data.crop import CropParams, CropParamsBatch
from podscale.data.decode import RESAMPLING, Pixels, crop_and_resize, decode
from podscale.data.decode_index import MAX_INDEX_PERCENT, NO_INDEX, ImageIndex

log = logging.getLogger("podscale.data")

_native: Any
try:
    _native = importlib.import_module("podscale.data._native")
except ImportError:  # built without cargo, or for another machine
    _native = None

REASONS = {1: "format", 2: "size", 3: "data", 4: "index"}
"""Reason of a refusal by its number in the extension: `format` is another kind of image or an unusual header, `size`
another size than the index has, `data` damaged or unusual entropy-coded data, `index` a decode index that is damaged or
not the image's."""


NO_RECORD: Pixels = np.empty(0, dtype=np.uint8)
"""Record that the extension refuses."""


def is_installed() -> bool:
    """Return True if the extension is installed."""
    return _native is not None


def is_available() -> bool:
    """Return True if the extension is installed, and the installed Pillow has its pixels."""
    return is_installed() and pillow_order() is not None


PassOrder = Literal["rows first", "fewest values first"]
"""Order in which Pillow resizes: before version 13 rows first, but for rectangles more than 100 times as high as wide;
since then columns first if that saves more."""
ORDERS: tuple[PassOrder, ...] = ("fewest values first", "rows first")


@cache
def pillow_order() -> PassOrder | None:
    """Return the order of the installed Pillow, found by a few crops; None and a warning if it has other pixels."""
    order = next((order for order in ORDERS if _has_pillows_pixels(order)), None)
    if order is None:
        log.warning("the native decoder is not used: the installed Pillow %s has other pixels", PIL.__version__)
    return order


def _has_pillows_pixels(order: PassOrder) -> bool:
    noise = np.random.default_rng(0).integers(0, 256, (61, 50, 3)).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "JPEG", quality=90, subsampling=2)
    record = np.frombuffer(file.getvalue(), dtype=np.uint8)
    shapes = ((50, 61), (50, 20), (13, 61), (9, 9))
    crops = [CropParams(0, 0, *shape, 16, 16, 0, 0, False) for shape in shapes]
    columns = CropParamsBatch(*(np.array(column) for column in zip(*crops, strict=True)))
    height, width, images = np.full(4, 61), np.full(4, 50), np.empty((4, 16, 16, 3), dtype=np.uint8)
    decoder, pixels = CropDecoder(1, order=order), decode(record)
    for interpolation in RESAMPLING:
        status = decoder.decode([record] * 4, height, width, columns, images, interpolation)
        wanted = [np.asarray(crop_and_resize(pixels, crop, 16, interpolation)) for crop in crops]
        if status.any() or not np.array_equal(images, wanted):
            return False
    return True


def build_decode_index(record: bytes | Pixels, interval: int, *, max_percent: int = MAX_INDEX_PERCENT) -> bytes:
    """Return the decode index of an encoded image; empty if it needs none or the extension does not decode it.

    Args:
        record: the encoded image, bytes or contiguous uint8 [bytes].
        interval: MCUs between two entries; more if the index would have more than `max_percent` of the image's bytes.
    """
    return bytes(_native.build_index(record, interval, max_percent))


def kernels() -> list[str]:
    """Return the versions of the extension's kernels that this processor runs, the fastest first.

    They are `avx512`, `avx2`, `neon` and `portable`, all with the same pixels. Empty unless it `is_available`.
    """
    return list(_native.kernels()) if is_available() else []


@cache
def can_augment() -> bool:
    """Return True if `affine` and `smooth` have the pixels of the installed Pillow to the bit.

    They have those of its wheels for x86-64. Compilers for other processors may fuse multiplications with additions.
    """
    if not hasattr(_native, "affine"):
        return False
    pixels = np.random.default_rng(0).integers(0, 256, (29, 31, 3), dtype=np.uint8)
    image, matrix = Image.fromarray(pixels), (0.9, 0.3, -4.1, -0.2, 1.1, 2.3)
    for interpolation, resample in RESAMPLING.items():
        expected = image.transform(image.size, Image.Transform.AFFINE, matrix, resample, fillcolor=(1, 2, 3))
        if not np.array_equal(affine(pixels, matrix, interpolation, (1, 2, 3)), np.asarray(expected)):
            return False
    return np.array_equal(smooth(pixels), np.asarray(image.filter(ImageFilter.SMOOTH)))


def affine(pixels: Pixels, matrix: Sequence[float], interpolation: Interpolation, fill: tuple[int, int, int]) -> Pixels:
    """Return Pillow's affine transform of an image, uint8 [height, width, 3].

    Args:
        pixels: uint8 [height, width, 3], contiguous.
        matrix: where pixel (x, y) lies in the image: (a x + b y + c, d x + e y + f).
        fill: colour of pixels from outside.
    """
    out = np.empty_like(pixels)
    _native.affine(pixels, tuple(matrix), interpolation == "bicubic", fill, out)
    return out


def smooth(pixels: Pixels) -> Pixels:
    """Return an image with Pillow's filter SMOOTH, uint8 [height, width, 3]; `pixels` are contiguous."""
    out = np.empty_like(pixels)
    _native.smooth(pixels, out)
    return out


def can_share_images() -> bool:
    """Return True if the extension is installed and has a store for images in shared memory."""
    return hasattr(_native, "SharedImages")


def open_shared_images(memory: Pixels, rows: int, identity: int) -> Any:
    """Open the store of native/src/shared.rs; raises ValueError if the memory is too small or has other images.

    Args:
        memory: uint8 [bytes], writable, shared with the other processes; all zero at first.
        rows: number of images.
        identity: number of the images' split, not 0.
    """
    return _native.SharedImages(memory, rows, identity)


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Quantised DCT coefficients of a JPEG, packed for a cache; native/src/coefficients.rs has their layout."""

    packed: bytes | Pixels

    @property
    def nbytes(self) -> int:
        return len(self.packed)


class CropDecoder:
    """Decoder of batches of crops in `threads` threads, without the GIL. Safe from several threads.

    Args:
        kernels: version of the kernels, one of `kernels()`; default: the fastest.
        order: order of the passes of the resize; default: the installed Pillow's.
    """

    def __init__(self, threads: int, *, kernels: str | None = None, order: PassOrder | None = None) -> None:
        self._decoder = _native.CropDecoder(threads, kernels)
        self._rows_first = (order or pillow_order()) == "rows first"

    def decode(
        self,
        records: Sequence[Pixels | Coefficients],
        heights: npt.NDArray[np.integer],
        widths: npt.NDArray[np.integer],
        crops: CropParamsBatch,
        images: Pixels,
        interpolation: Interpolation | npt.NDArray[np.bool_],
        indexes: Sequence[ImageIndex] | None = None,
    ) -> npt.NDArray[np.uint8]:
        """Write the crops to `images`. Returns 0 or the number of the reason for each record, uint8 [n].

        The images of refused records have no meaning.

        Args:
            records: n encoded images, uint8 [bytes], or decoded ones, uint8 [height, width, 3], or kept coefficients.
            heights: [n], height that each image must have, pixels.
            widths: [n], width that each image must have, pixels.
            crops: crops of the records; further ones are ignored.
            images: uint8 [n, size, size, 3], contiguous; written.
            interpolation: filter of all crops; or bool [n], True for each bicubic crop and False for a bilinear one.
            indexes: n decode indexes, uint8 [bytes], `NO_INDEX` for an image without one. None: no image has one.
        """
        columns = [heights, widths, *(getattr(crops, name)[: len(records)] for name in CropParams._fields)]
        table = np.stack(columns, axis=1).astype(np.int64)
        status = np.zeros(len(records), dtype=np.uint8)
        found = [NO_INDEX] * len(records) if indexes is None else list(indexes)
        is_packed = [isinstance(record, Coefficients) for record in records]
        buffers = [record.packed if isinstance(record, Coefficients) else record for record in records]
        is_bicubic = (
            np.full(len(records), interpolation == "bicubic") if isinstance(interpolation, str) else interpolation
        )
        for bicubic in np.unique(is_bicubic).tolist():  # a call of the extension has one filter
            chosen = is_bicubic == bicubic
            # It refuses the empty records in place of the other crops before it writes to their images.
            own = [buffer if one else NO_RECORD for buffer, one in zip(buffers, chosen.tolist(), strict=True)]
            packed = np.logical_and(is_packed, chosen).tolist()
            reasons = np.zeros(len(records), dtype=np.uint8)
            self._decoder.decode(own, packed, found, table, images, reasons, images.shape[1], bicubic, self._rows_first)
            status[chosen] = reasons[chosen]
        return status

    def pack(self, records: Sequence[Pixels], limits: Sequence[int]) -> list[Coefficients | None]:
        """Return the coefficients of JPEGs; None for an image that is refused, or whose coefficients are too large.

        Args:
            records: n encoded images, uint8 [bytes].
            limits: n sizes above which coefficients are too large, bytes.
        """
        found = self._decoder.pack(list(records), list(limits))
        return [None if packed is None else Coefficients(packed) for packed in found]
