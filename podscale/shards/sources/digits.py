"""The embedded data set: scikit-learn's 1,797 real handwritten digits of 8x8 pixels and 17 gray levels.

Source: E. Alpaydin, C. Kaynak, Optical Recognition of Handwritten Digits, UCI machine learning repository (1998).
"""

import gzip
import importlib.util
import struct
import zlib
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from podscale.errors import InputError
from podscale.shards.sources.base import Item

GRAY_LEVELS = 16
"""The darkest stroke; level 0 is the background."""


class Digits:
    """The digits as gray PNG files, made in memory; class names are "0" to "9"."""

    @cached_property
    def _images(self) -> list[bytes]:
        levels = self._table[:, :-1].reshape(-1, 8, 8)
        # 16 levels spread over 0..255, each to a value of its own: nothing is lost
        return [gray_png(np.rint(image * (255 / GRAY_LEVELS)).astype(np.uint8)) for image in levels]

    @cached_property
    def _table(self) -> npt.NDArray[np.uint8]:
        """One row per digit: 64 levels and the label."""
        with gzip.open(_file(), "rt", encoding="ascii") as text:
            return np.loadtxt(text, delimiter=",", dtype=np.uint8)

    def items(self) -> Iterator[Item]:
        for number, label in enumerate(self._table[:, -1]):
            yield Item(b"digits/%04d.png" % number, str(int(label)), len(self._images[number]))

    def read(self, item: Item) -> bytes:
        return self._images[int(item.name[7:11])]


def _file() -> Path:
    """The table inside scikit-learn, which is not imported for it: with SciPy that takes longer than packing."""
    package = importlib.util.find_spec("sklearn")
    places = [Path(place) for place in (package.submodule_search_locations or ())] if package else []
    found = [place / "datasets" / "data" / "digits.csv.gz" for place in places]
    if not found or not found[0].is_file():
        raise InputError(
            "they come with scikit-learn, which is not installed",
            field="data.source",
            got="digits",
            hint="Run `pip install scikit-learn`",
        )
    return found[0]


def gray_png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """A PNG file of uint8 [height, width] gray pixels, stored (not compressed): the same bytes with any zlib."""
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
