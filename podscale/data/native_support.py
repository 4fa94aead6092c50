"""Images of a split that the native extension leaves to the reference path, or that have no decode index, by reason.

Headers are enough for both, so no image is decoded, and the extension need not be installed. The rules are those of
native/src/header.rs and native/src/index.rs.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from podscale.data.decode_index import CHECKSUM_BYTES, MAX_INDEX_PERCENT, DecodeIndex
from podscale.data.index import JPEG, ImageFlag
from podscale.data.shard_set import Split

MAX_HEADERS = 20_000
"""Headers of a split that are read, evenly spaced, if more images have no index."""
_CONTAINER_BYTES, _PREFIX_BYTES = 8, CHECKSUM_BYTES + 2
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_SEQUENTIAL, _PROGRESSIVE, _ARITHMETIC = (0xC0, 0xC1), (0xC2,), range(0xC9, 0xD0)
_SCAN, _APP0, _APP14, _END = 0xDA, 0xE0, 0xEE, b"\xff\xd9"
_SAMPLINGS = ((1, 1), (2, 1), (2, 2))
"""Sampling factors of luma, horizontally and vertically."""
UNUSUAL = "an unusual header"


class JpegLayout(NamedTuple):
    """Reason for which the extension does not decode a JPEG, empty if it does; then its MCUs and components."""

    refusal: str
    mcus: int = 0
    components: int = 0


@dataclass(frozen=True)
class NativeSupport:
    """Images in use that the extension does not decode, or decodes without an index.

    Args:
        refused: Images that the reference path decodes, by reason.
        without_index: Images without an entry in the index of their shard that the extension decodes, by reason.
        unread: Images whose header was not read, because there are too many.
    """

    refused: dict[str, int]
    without_index: dict[str, int]
    unread: int

    @classmethod
    def count(cls, split: Split, indexes: Mapping[int, DecodeIndex]) -> "NativeSupport":
        """Count the images of a split.

        Args:
            indexes: usable decode indexes by the number of their shard.
        """
        lengths, intervals = np.zeros(len(split), dtype=np.int64), np.zeros(len(split), dtype=np.int64)
        for number, index in indexes.items():
            rows = split.rows_of_shard(number)
            lengths[rows], intervals[rows] = index.lengths[split.numbers_in_shard(rows)], index.interval
        is_jpeg, is_sequential = split.column("format") == JPEG, sequential_jpegs(split)
        refused = Counter({"PNG": int((~is_jpeg).sum()), "progressive": int((is_jpeg & ~is_sequential).sum())})
        without_index = Counter[str]()
        unknown = np.flatnonzero(is_sequential & (lengths == 0))
        chosen = unknown[:: -(-len(unknown) // MAX_HEADERS) or 1]
        for row in chosen.tolist():
            record = split.read(row)
            layout = read_layout(record.data)
            if layout.refusal:
                refused[layout.refusal] += 1
            elif intervals[row]:
                is_small = is_too_small(len(record), layout, int(intervals[row]))
                without_index["too small" if is_small else "unusual or too long codes"] += 1
        return cls(dict(+refused), dict(without_index), len(unknown) - len(chosen))


def sequential_jpegs(split: Split) -> npt.NDArray[np.bool_]:
    """Return True for each image that is a sequential JPEG, which the extension decodes unless it is unusual."""
    found: npt.NDArray[np.bool_] = (split.column("format") == JPEG) & (
        (split.column("flags") & ImageFlag.PROGRESSIVE) == 0
    )
    return found


def has_mostly_sequential_jpegs(split: Split) -> bool:
    """Return True if more than half of the images are sequential JPEGs."""
    return 2 * int(np.count_nonzero(sequential_jpegs(split))) > len(split)


def is_too_small(size: int, layout: JpegLayout, interval: int) -> bool:
    """Return True if a JPEG of `size` bytes has no MCU but the first at which an index could have an entry."""
    entries = (size * MAX_INDEX_PERCENT // 100 - _CONTAINER_BYTES - _PREFIX_BYTES) // (2 + 2 * layout.components)
    fewest = -(-layout.mcus // min(max(entries, 1), layout.mcus))
    return layout.mcus <= max(interval, fewest)


def read_layout(data: memoryview) -> JpegLayout:
    """Return the layout of a JPEG from its header, without the check of its tables."""
    if bytes(data[-2:]) != _END:
        return JpegLayout("no end marker")
    at, layout, components, is_jfif, adobe = 2, None, b"", False, None
    while at + 4 <= len(data) and data[at] == 0xFF:
        marker, end = data[at + 1], at + 2 + (data[at + 2] << 8 | data[at + 3])
        body = bytes(data[at + 4 : end])
        if marker in _FRAMES:
            if layout is not None:
                return JpegLayout(UNUSUAL)
            layout, components = _read_frame(marker, body), body[6:]
            if layout.refusal:
                return layout
        elif marker == _APP0:
            is_jfif |= len(body) >= 14 and body.startswith(b"JFIF\0")
        elif marker == _APP14 and len(body) >= 12 and body.startswith(b"Adobe"):
            adobe = body[11]
        elif marker == _SCAN and layout is not None:
            is_ycc = is_jfif or (components[::3] == b"\1\2\3" if adobe is None else adobe == 1)
            if layout.components == 3 and not is_ycc:
                return JpegLayout("RGB")
            is_whole = body[1:-3:2] == components[::3] and body[-3:] == b"\x00\x3f\x00"
            return layout if is_whole else JpegLayout(UNUSUAL)
        at = end
    return JpegLayout(UNUSUAL)


def _read_frame(marker: int, body: bytes) -> JpegLayout:
    """Return the layout by the frame header, the content of a segment of this marker."""
    if marker in _PROGRESSIVE:
        return JpegLayout("progressive")
    if marker not in _SEQUENTIAL:
        return JpegLayout("arithmetic coding" if marker in _ARITHMETIC else "lossless or hierarchical")
    if len(body) < 6 or len(body) != 6 + 3 * body[5]:
        return JpegLayout(UNUSUAL)
    if body[0] != 8:
        return JpegLayout(f"{body[0]} bits a sample")
    height, width, components = body[1] << 8 | body[2], body[3] << 8 | body[4], body[5]
    if components == 4:
        return JpegLayout("CMYK")
    if components not in (1, 3) or not height or not width:
        return JpegLayout(UNUSUAL)
    luma, *chroma = [(factor >> 4, factor & 15) for factor in body[7::3]]
    luma = (1, 1) if components == 1 else luma
    if luma not in _SAMPLINGS or any(factor != (1, 1) for factor in chroma):
        return JpegLayout("other chroma sampling")
    return JpegLayout("", -(-width // (8 * luma[0])) * -(-height // (8 * luma[1])), components)
