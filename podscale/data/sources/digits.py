"""Embedded data set: 1,797 real handwritten digits of 8x8 pixels and 17 gray levels.

Source: E. Alpaydin, C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository (1998),
https://doi.org/10.24432/C50P49, CC BY 4.0: its test set, in the order of scikit-learn's load_digits.
"""

import struct
import zlib
from collections.abc import Iterator
from functools import cached_property
from importlib.resources import files

import numpy as np
import numpy.typing as npt

from podscale.data.sources.base import SourceItem

GRAY_LEVELS = 16
"""Level of the darkest stroke; level 0 is the background."""


class DigitsSource:
    """Digits as gray PNG files in memory; class names are "0" to "9"."""

    def items(self) -> Iterator[SourceItem]:
        for number, label in enumerate(self._arrays["labels"]):
            yield SourceItem(b"digits/%04d.png" % number, str(int(label)), len(self._images[number]))

    def read(self, item: SourceItem) -> bytes:
        return self._images[int(item.name[7:11])]

    @cached_property
    def _images(self) -> list[bytes]:
        # 17 levels spread over 0..255, all distinct
        return [gray_png(np.rint(levels * (255 / GRAY_LEVELS)).astype(np.uint8)) for levels in self._arrays["levels"]]

    @cached_property
    def _arrays(self) -> dict[str, npt.NDArray[np.uint8]]:
        return load()


def load() -> dict[str, npt.NDArray[np.uint8]]:
    """Return `levels`, uint8 [1797, 8, 8] of 0 to 16, and `labels`, uint8 [1797] of 0 to 9."""
    with files(__package__).joinpath("digits.npz").open("rb") as file, np.load(file) as arrays:
        return dict(arrays)


def gray_png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """Return a PNG of gray `pixels`, uint8 [height, width], uncompressed: its bytes do not depend on zlib."""
    height, width = pixels.shape
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)  # filter type 0 before every row
    return (
        b"\x89PNG\r\n\x1a\n"
        + _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
        + _chunk(b"IDAT", zlib.compress(rows, 0))
        + _chunk(b"IEND", b"")
    )


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
