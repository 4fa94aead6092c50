"""Loader interface, batch type, and the guard that counts, replaces and limits records that cannot be decoded."""

import logging
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from podscale.data.shard_set import Split
from podscale.errors import PodscaleError


@dataclass(frozen=True)
class Batch:
    """Images of one rank for one step of training or evaluation.

    Args:
        images: uint8 [n, height, width, 3]; a NumPy array, in pinned memory for a GPU, or a device tensor that any
            stream may read.
        labels: int64 [n], class indices.
        keys: uint64 [n], sample keys.
        weights: float32 [n]; 1 for a sample, 0 for padding, which keeps shapes equal across ranks.
        step: number of the global batch, from 0 over the whole run.
    """

    images: Any
    labels: npt.NDArray[np.int64]
    keys: npt.NDArray[np.uint64]
    weights: npt.NDArray[np.float32]
    step: int

    def __len__(self) -> int:
        return len(self.labels)


class Loader(Protocol):
    """Iterator over batches that follows the sample order exactly and can start at any step."""

    @property
    def bad_records(self) -> int:
        """Number of records that this rank could not decode so far."""
        ...

    @property
    def queued_batches(self) -> int | None:
        """Decoded batches in the queue, None if unknown; safe from any thread."""
        ...

    @property
    def native_refusals(self) -> Mapping[str, int]:
        """Number of images that the native extension left to the reference path, by reason."""
        ...

    @property
    def cached_bytes(self) -> Mapping[str, int]:
        """Bytes that this process keeps in memory, by cache: `records` (compressed) and `decoded`."""
        ...

    def batches(self, start: int, stop: int) -> Iterator[Batch]:
        """Yield the rank's slices of the global batches start, ..., stop - 1."""
        ...

    def close(self) -> None:
        """Stop the workers and release memory; safe to call twice."""
        ...


log = logging.getLogger("podscale.data")

TOLERATED_BAD_RECORDS = 10
"""Bad records allowed at any rate, unless input.max_bad_rate is 0."""


class BadRecordGuard:
    """Bad records of a split: those that one rank could not decode.

    The substitute of a bad record is the next decodable record of its shard, so that a host reads no other shard.
    Epochs are independent: a loader that decodes only the crop may accept a damaged image in one epoch and not in
    another, and the substitute must not depend on the step at which a run resumed.
    """

    def __init__(self, split: Split, max_bad_rate: float) -> None:
        self.bad_records = 0
        self._split = split
        self._max_bad_rate = max_bad_rate
        self._seen = 0
        self._bad: set[tuple[int, int]] = set()
        self._logged: set[int] = set()
        self._lock = threading.Lock()

    def substitute_all(self, rows: npt.NDArray[np.int64], epochs: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return `rows` with substitutes for those known to be bad in their `epochs`; all int64 [n]."""
        if not self._bad:
            return rows
        pairs = zip(rows.tolist(), epochs.tolist(), strict=True)
        return np.array([self.substitute(row, epoch) for row, epoch in pairs], dtype=np.int64)

    def substitute(self, row: int, epoch: int) -> int:
        """Return `row`, or the next good row of its shard if it is known to be bad in this epoch."""
        if (row, epoch) not in self._bad:
            return row
        shard = self._split.column("shard")
        members = np.flatnonzero(shard == shard[row])
        begin = int(np.searchsorted(members, row))
        for other in np.roll(members, -begin).tolist():
            if (other, epoch) not in self._bad:
                return int(other)
        raise PodscaleError(
            f"no record of this shard of the {self._split.name} split can be decoded",
            field=self._split.shard_names[int(shard[row])],
            hint="Check the set with `podscale shard --inspect DIR --verify`, then shard the source again.",
        )

    def mark_bad(self, row: int, epoch: int, reason: str) -> None:
        """Mark a record as bad in this epoch, and log it the first time."""
        with self._lock:
            self._bad.add((row, epoch))
            if row in self._logged:
                return
            self._logged.add(row)
        key, shard = int(self._split.keys[row]), int(self._split.column("shard")[row])
        log.warning(
            "cannot decode sample %d (%s/%s, offset %d): %s; using the next sample of the shard instead",
            key,
            self._split.name,
            self._split.shard_names[shard],
            int(self._split.column("offset")[row]),
            reason,
        )

    def count_delivered(self, seen: int, bad: int) -> None:
        """Count the samples of a batch; raise PodscaleError if too many so far were bad."""
        self._seen += seen
        self.bad_records += bad
        limit = self._max_bad_rate * self._seen
        if self._max_bad_rate > 0:
            limit = max(limit, TOLERATED_BAD_RECORDS)
        if self.bad_records > limit:
            raise PodscaleError(
                f"{self.bad_records} of {self._seen} records of the {self._split.name} split could not be decoded, "
                "more than allowed",
                field="input.max_bad_rate",
                got=self._max_bad_rate,
                hint="Check the set with `podscale shard --inspect DIR --verify` and shard the source again, or raise "
                "the limit.",
            )
