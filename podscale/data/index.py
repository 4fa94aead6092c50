"""Binary index of a split: fixed little-endian columns, memory-mapped, one row per packed image.

Layout: magic (8 bytes), version u32, number of columns u32, rows u64, then the columns in the order of `INDEX_COLUMNS`,
each aligned to 64 bytes. Source paths are in a separate file (`SourceNames`), because their lengths differ.
"""

import struct
from collections.abc import Mapping, Sequence
from enum import IntFlag
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from podscale.data.sharding.file_formats import map_file
from podscale.errors import InputError
from podscale.util.files import write_atomically

INDEX_MAGIC = b"PODSIDX\0"
INDEX_VERSION = 1
INDEX_ALIGNMENT = 64
_HEADER = struct.Struct("<8sIIQ")

INDEX_COLUMNS: Mapping[str, str] = {
    "key": "<u8",
    "offset": "<u8",
    "size": "<u4",
    "shard": "<u4",
    "label": "<i4",
    "height": "<u2",
    "width": "<u2",
    "format": "u1",
    "flags": "u1",
}
"""Column -> dtype. `key` identifies the sample and seeds its augmentation; `offset` and `size` are bytes in its tar."""

JPEG, PNG = 1, 2


class ImageFlag(IntFlag):
    """Flag of a record."""

    DROPPED = 1
    """Duplicate, packed but left out of the split by `data.dedup=drop`."""
    GRAY = 2
    CMYK = 4
    PROGRESSIVE = 8
    CONVERTED = 16
    """Rewritten to a clean RGB JPEG by `data.policy=convert`."""
    RESIZED = 32
    ROTATED = 64
    """Has an EXIF rotation; loaders ignore it, as reference pipelines do."""


def encode_index(columns: Mapping[str, npt.ArrayLike]) -> bytes:
    """Return the index file of `columns`, one-dimensional and of one length, with the names of INDEX_COLUMNS."""
    if set(columns) != set(INDEX_COLUMNS):
        raise ValueError(f"an index has the columns {list(INDEX_COLUMNS)}, got {list(columns)}")
    arrays = {name: np.ascontiguousarray(columns[name], dtype=dtype) for name, dtype in INDEX_COLUMNS.items()}
    rows = len(arrays["key"])
    if any(array.shape != (rows,) for array in arrays.values()):
        raise ValueError("the columns of an index must be one-dimensional and of one length")
    content = bytearray(_HEADER.pack(INDEX_MAGIC, INDEX_VERSION, len(INDEX_COLUMNS), rows))
    for array in arrays.values():
        content.extend(bytes(-len(content) % INDEX_ALIGNMENT))
        content.extend(array.tobytes())
    return bytes(content)


def write_index(path: Path, columns: Mapping[str, npt.ArrayLike]) -> None:
    """Write an index file; `columns` as in `encode_index`."""
    write_atomically(path, encode_index(columns))


def read_index(path: Path) -> dict[str, npt.NDArray[Any]]:
    """Return the columns, memory-mapped and read-only; raises InputError for a damaged file or another version."""
    try:
        with path.open("rb") as file:
            raw = map_file(file)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read the shard index: {error}", field=str(path)) from error
    if len(raw) < _HEADER.size:
        raise InputError(
            f"not a shard index: only {len(raw)} bytes", field=str(path), hint="Run `podscale shard` again."
        )
    magic, version, column_count, rows = _HEADER.unpack(raw[: _HEADER.size].tobytes())
    if magic != INDEX_MAGIC or version != INDEX_VERSION or column_count != len(INDEX_COLUMNS):
        raise InputError(
            f"not a shard index of version {INDEX_VERSION}", field=str(path), hint="Run `podscale shard` again."
        )
    columns: dict[str, npt.NDArray[Any]] = {}
    offset = _HEADER.size
    for name, dtype in INDEX_COLUMNS.items():
        offset += -offset % INDEX_ALIGNMENT
        end = offset + rows * np.dtype(dtype).itemsize
        if end > len(raw):
            raise InputError("the shard index is truncated", field=str(path), hint="Run `podscale shard --verify`")
        columns[name] = raw[offset:end].view(dtype)
        offset = end
    return columns


class SourceNames:
    """Source paths in row order, as bytes; the file has u64 end offsets followed by the text."""

    def __init__(self, path: Path, rows: int) -> None:
        with path.open("rb") as file:
            self._raw = map_file(file)
        self._ends = self._raw[: rows * 8].view("<u8")
        self._start = rows * 8

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, row: int) -> bytes:
        begin = int(self._ends[row - 1]) if row else 0
        return self._raw[self._start + begin : self._start + int(self._ends[row])].tobytes()

    @staticmethod
    def encode(paths: Sequence[bytes]) -> bytes:
        ends = np.cumsum([len(path) for path in paths], dtype="<u8")
        return ends.tobytes() + b"".join(paths)
