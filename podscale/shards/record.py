"""The record of one packed shard: its hash and one row per image, kept beside the shards so that packing resumes."""

import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from podscale.errors import InputError
from podscale.shards import columnar, index
from podscale.shards.plan import Plan

COLUMNS = {**index.COLUMNS, "digest_high": "<u8", "digest_low": "<u8"}
"""The index's columns and the xxh3-128 of the source bytes, by which duplicates are found."""


@dataclass(frozen=True)
class Reject:
    """An image that was left out."""

    key: int
    reason: str
    detail: str


UNREADABLE = "unreadable"
"""The one reason that may be gone next time: a shard with such a reject is packed again by the next run."""


@dataclass(frozen=True)
class Record:
    """What is in a shard file: its bytes and sha256 (empty where hashing was off), images and rejects."""

    plan: str
    bytes: int
    sha256: str
    columns: dict[str, npt.NDArray[Any]]
    rejects: list[Reject] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.columns["key"])

    @property
    def final(self) -> bool:
        return all(reject.reason != UNREADABLE for reject in self.rejects)

    def write(self, path: Path) -> None:
        header = {
            "kind": "record",
            "plan": self.plan,
            "bytes": self.bytes,
            "sha256": self.sha256,
            "rejects": [[reject.key, reject.reason, reject.detail] for reject in self.rejects],
        }
        columnar.write(path, header, self.columns)

    @classmethod
    def read(cls, path: Path) -> "Record":
        """Raises InputError where the file is no record."""
        header, columns = columnar.read(path)
        rejects = [Reject(*entry) for entry in header["rejects"]]
        return cls(header["plan"], header["bytes"], header["sha256"], columns, rejects)


def path_of(directory: Path, plan: Plan, split: str, shard: int) -> Path:
    """Where the record of a shard is kept: beside the split folders, out of the way of readers of tars."""
    return directory / "records" / split / plan.shard_name(split, shard).replace(".tar", ".record")


def matching(directory: Path, plan: Plan, split: str, shard: int) -> Record | None:
    """The record of a shard that is there as this plan wants it, by name and size; None where it must be packed."""
    try:
        record = Record.read(path_of(directory, plan, split, shard))
        size = (directory / split / plan.shard_name(split, shard)).stat().st_size
    except (InputError, OSError):
        return None
    return record if record.plan == plan.fingerprint and record.bytes == size else None


class Rows:
    """Collects the rows of a record as bytes: kept as tuples, they would have the garbage collector walk them all."""

    _DTYPE = np.dtype(list(COLUMNS.items()))
    _STRUCT = struct.Struct("<" + "".join(np.dtype(dtype).char for dtype in COLUMNS.values()).replace("L", "Q"))

    def __init__(self) -> None:
        self._rows = bytearray()

    def add(self, *row: int) -> None:
        """One row, in the order of `COLUMNS`; raises struct.error where a number does not fit its column."""
        self._rows += self._STRUCT.pack(*row)

    def columns(self) -> dict[str, npt.NDArray[Any]]:
        rows = np.frombuffer(self._rows, dtype=self._DTYPE)
        return {name: np.ascontiguousarray(rows[name]) for name in COLUMNS}
