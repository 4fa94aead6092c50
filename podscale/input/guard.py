"""Records that cannot be decoded: counted, substituted, logged once, and too many of them end the run."""

import logging
import threading

import numpy as np
import numpy.typing as npt

from podscale.errors import PodscaleError
from podscale.shards.shardset import Split

log = logging.getLogger("podscale.input")

TOLERATED_BAD_RECORDS = 10
"""So many bad records are no reason to stop whatever their share is, unless the document tolerates none."""


class BadRecordGuard:
    """What one rank knows of the bad records of a split.

    A bad record is replaced by the next one of its shard that can be decoded, so that a host reads no other shard.
    Nothing is carried from one epoch to the next: a loader that decodes only the crop may accept a damaged image in
    one epoch and not in another, and what takes its place must not depend on where a run was started.
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
        """The rows with those known as bad in their epoch replaced."""
        if not self._bad:
            return rows
        pairs = zip(rows.tolist(), epochs.tolist(), strict=True)
        return np.array([self.substitute(row, epoch) for row, epoch in pairs], dtype=np.int64)

    def substitute(self, row: int, epoch: int) -> int:
        """`row` itself unless it is known as bad in this epoch; otherwise the next row of its shard that is not."""
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
            hint="Run `podscale shard --inspect` with verification, then shard the source again.",
        )

    def mark_bad(self, row: int, epoch: int, reason: str) -> None:
        """Marks a record as bad in this epoch and logs it, the first time."""
        with self._lock:
            self._bad.add((row, epoch))
            if row in self._logged:
                return
            self._logged.add(row)
        key, shard = int(self._split.keys[row]), int(self._split.column("shard")[row])
        log.warning(
            "cannot decode sample %d (%s/%s, offset %d): %s; the next sample of the shard takes its place",
            key,
            self._split.name,
            self._split.shard_names[shard],
            int(self._split.column("offset")[row]),
            reason,
        )

    def count_delivered(self, seen: int, bad: int) -> None:
        """Counts the samples of a batch; raises PodscaleError where too many so far were bad."""
        self._seen += seen
        self.bad_records += bad
        limit = self._max_bad_rate * self._seen
        if self._max_bad_rate > 0:
            limit = max(limit, TOLERATED_BAD_RECORDS)
        if self.bad_records > limit:
            raise PodscaleError(
                f"{self.bad_records} of {self._seen} records of the {self._split.name} split could not be decoded, "
                "which is more than this allows",
                field="input.max_bad_rate",
                got=self._max_bad_rate,
                hint="Verify the shard set with `podscale shard --inspect` and shard the source again, or raise it.",
            )
