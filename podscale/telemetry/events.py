"""Event log of a run, metrics.jsonl: rank 0 of each launch writes a JSON line per logged step, evaluation and event."""

import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

TAIL_BYTES = 2**16

logger = logging.getLogger(__name__)

EventRecord = dict[str, Any]


class EventLog:
    """Writer of metrics.jsonl: records of kind step, evaluation and event, with `time` in unix seconds.

    A full disk loses lines and logs one warning. Non-finite numbers are written as null. `fence` is called before each
    line; it raises if a newer launch owns the run.
    """

    def __init__(self, path: Path, fence: Callable[[], None] | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._fence = fence or (lambda: None)
        self._warned = False
        self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._broken = not _ends_with_newline(self._descriptor)

    def step(
        self,
        step: int,
        *,
        epoch: float,
        loss: float,
        learning_rate: float,
        images_per_second: float,
        phases: Mapping[str, float],
        **more: Any,
    ) -> None:
        """Write one logged step: `images_per_second` over all ranks, `phases` in seconds since the last line."""
        self._append(
            "step",
            step=step,
            epoch=round(epoch, 4),
            loss=loss,
            learning_rate=learning_rate,
            images_per_second=round(images_per_second, 2),
            phases={name: round(seconds, 6) for name, seconds in phases.items()},
            **more,
        )

    def evaluation(self, step: int, *, epoch: float, top1: float, top5: float, loss: float, **more: Any) -> None:
        """Write one evaluation of the validation split; accuracies are fractions."""
        self._append("evaluation", step=step, epoch=round(epoch, 4), top1=top1, top5=top5, loss=loss, **more)

    def event(self, event: str, **fields: Any) -> None:
        """Write any other event, for example start (with step and total_steps), resumed (with step) or checkpoint."""
        self._append("event", event=event, **fields)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> "EventLog":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _append(self, kind: str, **fields: Any) -> None:
        self._fence()
        record = _replace_nonfinite({"time": round(time.time(), 3), "kind": kind, **fields})
        data = (b"\n" if self._broken else b"") + json.dumps(record, allow_nan=False).encode() + b"\n"
        try:
            self._broken = os.write(self._descriptor, data) < len(data)
        except OSError as error:
            if not self._warned:
                logger.warning("%s: lines are being lost: %s", self._path, error.strerror)
            self._warned = True


def read_records(path: Path) -> Iterator[EventRecord]:
    """Yield every complete record in order; nothing if the file does not exist."""
    if not path.exists():
        return
    with path.open("rb") as file:
        yield from (record for line in file if (record := parse_record(line)) is not None)


def newest_step(path: Path) -> int:
    """Return the highest step in the last lines of the log; 0 if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            records = map(parse_record, file.read().splitlines())
            return max((r["step"] for r in records if r is not None and r["kind"] == "step"), default=0)
    except OSError:
        return 0


def parse_record(line: bytes) -> EventRecord | None:
    """Return the record of a line; None for an incomplete or unknown line."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        return None
    stepless = record["kind"] in ("step", "evaluation") and type(record.get("step")) is not int
    return None if stepless else record


class ReplayFilter:
    """Filter that keeps the records of an equivalent run without restarts.

    A launch that starts or resumes at step n drops the records of later steps, because it repeats them. A repeated step
    or evaluation replaces the earlier one.
    """

    def __init__(self) -> None:
        self.records: list[EventRecord] = []

    def add(self, record: EventRecord) -> None:
        if record["kind"] in ("step", "evaluation"):
            self.records = _drop_from_step(self.records, record["kind"], record["step"])
        elif record.get("event") in ("start", "resumed") and "step" in record:
            for kind in ("step", "evaluation"):
                self.records = _drop_from_step(self.records, kind, record["step"] + 1)
        self.records.append(record)


def filter_replays(records: Iterable[EventRecord]) -> list[EventRecord]:
    replays = ReplayFilter()
    for record in records:
        replays.add(record)
    return replays.records


def _drop_from_step(records: list[EventRecord], kind: str, first: int) -> list[EventRecord]:
    """Return the records without those of `kind` from step `first` on."""
    newest = next((record for record in reversed(records) if record["kind"] == kind), None)
    if newest is None or newest["step"] < first:
        return records
    return [record for record in records if record["kind"] != kind or record["step"] < first]


def _replace_nonfinite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _replace_nonfinite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_nonfinite(entry) for entry in value]
    return value


def _ends_with_newline(descriptor: int) -> bool:
    size = os.fstat(descriptor).st_size
    return size == 0 or os.pread(descriptor, 1, size - 1) == b"\n"


class FileTail:
    """Reader of the complete lines appended to a file since the last call; the file may not exist yet.

    Args:
        from_start: Also return the lines that are already in the file.
    """

    def __init__(self, path: Path, *, from_start: bool = False) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() and not from_start else 0
        self._rest = b""

    def read_lines(self) -> list[bytes]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return lines
