"""Record of one packed shard: its hash and one row per image, from which packing resumes."""

import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from podscale.data import index
from podscale.data.sharding import file_formats
from podscale.data.sharding.shard_plan import ShardPlan
from podscale.errors import InputError

RECORD_COLUMNS = {**index.INDEX_COLUMNS, "digest_high": "<u8", "digest_low": "<u8"}
"""Columns of the index, and the xxh3-128 of the source bytes, which identifies duplicates."""


@dataclass(frozen=True)
class RejectedImage:
    key: int
    reason: str
    detail: str


UNREADABLE = "unreadable"
"""Reject reason that may be temporary: the next run repacks a shard with such a reject."""


@dataclass(frozen=True)
class ShardRecord:
    """Record of a shard file; `sha256` is empty if hashing was off."""

    plan: str
    bytes: int
    sha256: str
    columns: dict[str, npt.NDArray[Any]]
    rejects: list[RejectedImage] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.columns["key"])

    @property
    def is_final(self) -> bool:
        return all(reject.reason != UNREADABLE for reject in self.rejects)

    def write(self, path: Path) -> None:
        header = {
            "kind": "record",
            "plan": self.plan,
            "bytes": self.bytes,
            "sha256": self.sha256,
            "rejects": [[reject.key, reject.reason, reject.detail] for reject in self.rejects],
        }
        file_formats.write_columns(path, header, self.columns)

    @classmethod
    def read(cls, path: Path) -> "ShardRecord":
        """Read a record; raises InputError if the file is not a record."""
        header, columns = file_formats.read_columns(path, "record")
        rejects = [RejectedImage(*entry) for entry in header["rejects"]]
        return cls(header["plan"], header["bytes"], header["sha256"], columns, rejects)


def record_path(directory: Path, plan: ShardPlan, split: str, shard: int) -> Path:
    """Return the path of a shard's record. It is outside the split folders, so that readers of tars do not see it."""
    return directory / "records" / split / plan.shard_name(split, shard).replace(".tar", ".record")


def find_record(directory: Path, plan: ShardPlan, split: str, shard: int) -> ShardRecord | None:
    """Return the record of a finished shard; None if it must be packed."""
    try:
        record = ShardRecord.read(record_path(directory, plan, split, shard))
        size = (directory / split / plan.shard_name(split, shard)).stat().st_size
    except (InputError, OSError):
        return None
    return record if record.plan == plan.fingerprint and record.bytes == size else None


class RecordRows:
    """Rows of a record, collected as bytes, because the garbage collector would visit tuples."""

    _DTYPE = np.dtype(list(RECORD_COLUMNS.items()))
    _STRUCT = struct.Struct("<" + "".join(np.dtype(dtype).char for dtype in RECORD_COLUMNS.values()).replace("L", "Q"))

    def __init__(self) -> None:
        self._rows = bytearray()

    def add(self, *row: int) -> None:
        """Add a row in the order of `RECORD_COLUMNS`; raises struct.error if a number does not fit its column."""
        self._rows += self._STRUCT.pack(*row)

    def columns(self) -> dict[str, npt.NDArray[Any]]:
        rows = np.frombuffer(self._rows, dtype=self._DTYPE)
        return {name: np.ascontiguousarray(rows[name]) for name in RECORD_COLUMNS}
