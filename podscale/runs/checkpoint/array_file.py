"""Safetensors files that are hashed while they are written.

The library's own writer would need a second pass for the hash, or a second copy in memory. Format: 8-byte little-endian
header length, JSON header, raw little-endian values.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load as load_safetensors

CHUNK_BYTES = 16 * 2**20
ALIGNMENT = 64
"""Alignment of the values in a file, bytes."""

SAFETENSORS_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}


@dataclass(frozen=True)
class WrittenFile:
    """Entry of a checkpoint's manifest for one file."""

    name: str
    bytes: int
    sha256: str


def write_arrays(path: Path, arrays: Mapping[str, npt.NDArray[Any]]) -> WrittenFile:
    """Write `arrays` in one pass and sync the file; the caller syncs the directory."""
    contiguous = {name: np.ascontiguousarray(array).reshape(array.shape) for name, array in arrays.items()}
    digest = hashlib.sha256()
    size = 0
    with path.open("wb", buffering=0) as file:
        flat = (array.reshape(-1).view(np.uint8).data for array in contiguous.values())
        for view in (memoryview(_header(contiguous)), *flat):
            for start in range(0, len(view), CHUNK_BYTES):
                chunk = view[start : start + CHUNK_BYTES]
                digest.update(chunk)
                _write_all(file.fileno(), chunk)
            size += len(view)
        os.fsync(file.fileno())
    return WrittenFile(path.name, size, digest.hexdigest())


def read_arrays(path: Path, expected: WrittenFile) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of a file; raises ValueError if its size or hash differs from `expected`."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path.name} cannot be read: {error.strerror or error}") from error
    if len(content) != expected.bytes:
        raise ValueError(f"{path.name} has {len(content)} bytes instead of {expected.bytes}")
    if hashlib.sha256(content).hexdigest() != expected.sha256:
        raise ValueError(f"{path.name} does not match its sha256")
    return dict(load_safetensors(content))


def _header(arrays: Mapping[str, npt.NDArray[Any]]) -> bytes:
    entries: dict[str, Any] = {}
    offset = 0
    for name, array in arrays.items():
        entries[name] = {
            "dtype": SAFETENSORS_DTYPES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _write_all(descriptor: int, chunk: Any) -> None:
    """Write the whole chunk; a signal or a nearly full disk may cut a write short."""
    rest = memoryview(chunk)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
