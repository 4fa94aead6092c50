"""File formats of shard sets: column files and USTAR archives.

A column file is a plan or a shard record: magic (8 bytes), length of the header u64, the header (JSON, ASCII), then
each column aligned to 64 bytes. The header's "columns" entry lists name, dtype and length of each, in file order.

Archives are in the ustar interchange format of POSIX.1-1988, with owner, group and time 0 and mode 0644, so the same
members give the same bytes on every machine. Headers are made here, because `tarfile` takes 24 times as long for the
same bytes: with it, packing images without decoding them would take three times the CPU time.
"""

import json
import mmap
import struct
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from podscale.errors import InputError
from podscale.util.files import write_atomically

COLUMN_FILE_MAGIC = b"PODSCOL\0"
COLUMN_ALIGNMENT = 64
_PREFIX = struct.Struct("<8sQ")

Columns = Mapping[str, npt.NDArray[Any]]


def encode_columns(header: Mapping[str, Any], columns: Columns) -> bytes:
    """Return the column file of a header (JSON values) and one-dimensional `columns`, little-endian."""
    arrays = {name: np.ascontiguousarray(c, dtype=c.dtype.newbyteorder("<")) for name, c in columns.items()}
    listing = [[name, array.dtype.str, len(array)] for name, array in arrays.items()]
    text = json.dumps({**header, "columns": listing}, ensure_ascii=True, allow_nan=False).encode()
    content = bytearray(_PREFIX.pack(COLUMN_FILE_MAGIC, len(text)) + text)
    for array in arrays.values():
        content.extend(bytes(-len(content) % COLUMN_ALIGNMENT))
        content.extend(array.view(np.uint8).data)
    return bytes(content)


def map_file(file: BinaryIO) -> npt.NDArray[np.uint8]:
    """Map an open file read-only; the mapping keeps it open until it is released. Raises ValueError if it is empty.

    It is a plain array: indexing an np.memmap takes microseconds.
    """
    return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=np.uint8)


def write_columns(path: Path, header: Mapping[str, Any], columns: Columns) -> None:
    """Write a column file; `columns` are one-dimensional."""
    write_atomically(path, encode_columns(header, columns))


def read_columns(path: Path, kind: str) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
    """Return header and memory-mapped columns; raises InputError if it is no column file of `kind` or is truncated."""
    try:
        with path.open("rb") as file:
            raw = map_file(file)
    except (OSError, ValueError) as error:
        raise _unreadable(str(path), error) from error
    return parse_columns(raw, kind, str(path))


def parse_columns(
    raw: npt.NDArray[np.uint8], kind: str, where: str
) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
    """Return header and columns of a column file; raises InputError as `read_columns` does.

    Args:
        raw: uint8 [bytes], content of the file.
        where: Path or URL of the file, for the error.
    """
    try:
        magic, length = _PREFIX.unpack(raw[: _PREFIX.size].tobytes())
        if magic != COLUMN_FILE_MAGIC:
            raise ValueError("not a column file")
        header = json.loads(raw[_PREFIX.size : _PREFIX.size + length].tobytes())
        if header.pop("kind") != kind:
            raise ValueError(f"no {kind}, but another kind of column file")
        columns = {}
        offset = _PREFIX.size + length
        for name, dtype, count in header.pop("columns"):
            offset += -offset % COLUMN_ALIGNMENT
            end = offset + count * np.dtype(dtype).itemsize
            if end > len(raw):
                raise ValueError("it is truncated")
            columns[name] = raw[offset:end].view(dtype)
            offset = end
    except (ValueError, KeyError, TypeError, AttributeError, SyntaxError, struct.error) as error:  # dtypes are parsed
        raise _unreadable(where, error) from error
    return header, columns


def _unreadable(where: str, error: Exception) -> InputError:
    return InputError(f"cannot be read: {error}", field=where, hint="Delete it and run `podscale shard` again.")


def pack_byte_strings(prefix: str, texts: Sequence[bytes]) -> dict[str, npt.NDArray[Any]]:
    """Return byte strings as two columns: `<prefix>_ends` (end offsets) and `<prefix>_text` (joined bytes)."""
    ends = np.cumsum(np.fromiter(map(len, texts), dtype="<u8", count=len(texts)), dtype="<u8")
    return {f"{prefix}_ends": ends, f"{prefix}_text": np.frombuffer(b"".join(texts), dtype=np.uint8)}


class ByteStrings(Sequence[bytes]):
    """Byte strings in the `columns` that `pack_byte_strings` returned."""

    def __init__(self, columns: Columns, prefix: str) -> None:
        self._ends, self._text = columns[f"{prefix}_ends"], columns[f"{prefix}_text"]

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return self._range(*i.indices(len(self)))
        begin = int(self._ends[i - 1]) if i else 0
        return self._text[begin : int(self._ends[i])].tobytes()

    def _range(self, start: int, stop: int, step: int) -> list[bytes]:
        if step != 1 or start >= stop:
            return [self[i] for i in range(start, stop, step)]
        begin = int(self._ends[start - 1]) if start else 0
        ends = [0, *(self._ends[start:stop].astype(np.int64) - begin).tolist()]
        text = self._text[begin : begin + ends[-1]].tobytes()
        return [text[a:b] for a, b in pairwise(ends)]


TAR_BLOCK_BYTES = 512
TAR_END = bytes(2 * TAR_BLOCK_BYTES)


def _template() -> bytearray:
    header = bytearray(TAR_BLOCK_BYTES)
    header[100:108] = b"0000644\0"
    header[108:116] = header[116:124] = b"0000000\0"
    header[136:148] = b"00000000000\0"
    header[148:156] = b" " * 8  # the checksum is computed with spaces in its own field
    header[156:157] = b"0"
    header[257:265] = b"ustar\x0000"
    return header


_TEMPLATE = _template()
_TEMPLATE_SUM = sum(_TEMPLATE)


_MIDDLE, _TIME, _REST = bytes(_TEMPLATE[100:124]), bytes(_TEMPLATE[135:148]), bytes(_TEMPLATE[156:])


def tar_header(name: bytes, size: int) -> bytes:
    """Return the header of a regular file; `name` has at most 100 bytes, `size` is below 8 GiB."""
    assert 0 < len(name) <= 100
    assert 0 <= size < 8**11
    octal = b"%011o" % size
    checksum = b"%06o\0 " % (_TEMPLATE_SUM + sum(name) + sum(octal))
    return b"".join((name.ljust(100, b"\0"), _MIDDLE, octal, _TIME, checksum, _REST))


def tar_padding(size: int) -> int:
    return -size % TAR_BLOCK_BYTES


def tar_sample_bytes(size: int) -> int:
    """Return the size of a sample in a shard, in bytes: image and one-block label, each with a header."""
    return TAR_BLOCK_BYTES + size + tar_padding(size) + 2 * TAR_BLOCK_BYTES
