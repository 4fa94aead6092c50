"""Crops of JPEGs by the native extension (native/), with the pixels of Pillow to the bit.

The extension decodes sequential JPEGs in gray and in YCbCr 4:4:4, 4:2:2 and 4:2:0. It refuses all others, and damaged
ones; the reference path (`podscale.data.decode`) decodes those. Its absence costs time and never changes pixels.
"""

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from podscale.config.data import Interpolation
from podscale.data.crop import CropParams, CropParamsBatch
from podscale.data.decode import Pixels

_native: Any
try:
    _native = importlib.import_module("podscale.data._native")
except ImportError:  # built without cargo, or for another machine
    _native = None

REASONS = {1: "format", 2: "size", 3: "data"}
"""Reason of a refusal by its number in the extension: `format` is another kind of image or an unusual header, `size`
another size than the index has, `data` damaged or unusual entropy-coded data."""


def is_available() -> bool:
    """Return whether the extension is installed."""
    return _native is not None


def has_avx2() -> bool:
    """Return whether the extension uses AVX2 on this processor; without it, portable code gives the same pixels."""
    return bool(_native.has_avx2())


class CropDecoder:
    """Decoder of batches of crops in `threads` threads, without the GIL. Safe from several threads.

    Args:
        portable: do not use AVX2.
    """

    def __init__(self, threads: int, *, portable: bool = False) -> None:
        self._decoder = _native.CropDecoder(threads, portable=portable)

    def decode(
        self,
        records: Sequence[Pixels],
        heights: npt.NDArray[np.integer],
        widths: npt.NDArray[np.integer],
        crops: CropParamsBatch,
        images: Pixels,
        interpolation: Interpolation,
    ) -> npt.NDArray[np.uint8]:
        """Write the crops to `images`. Returns 0 or the number of the reason for each record, uint8 [n].

        The images of refused records have no meaning.

        Args:
            records: n encoded images, uint8 [bytes], or decoded ones, uint8 [height, width, 3].
            heights: [n], height that each image must have, pixels.
            widths: [n], width that each image must have, pixels.
            crops: crops of the records; further ones are ignored.
            images: uint8 [n, size, size, 3], contiguous; written.
        """
        columns = [heights, widths, *(getattr(crops, name)[: len(records)] for name in CropParams._fields)]
        table = np.stack(columns, axis=1).astype(np.int64)
        status = np.zeros(len(records), dtype=np.uint8)
        self._decoder.decode(list(records), table, images, status, images.shape[1], interpolation == "bicubic")
        return status
