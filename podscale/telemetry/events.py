"""metrics.jsonl: what happened in a run, one JSON line a time, appended by rank 0 of every launch.

New lines of a file that others append to.
"""

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
    """Appends lines of kind step, evaluation and event; every line carries `time` in unix seconds.

    `fence` raises where a newer launch has taken the run over; it is asked before each line, so it must be cheap.
    A full disk costs lines, and one warning, not the training. Numbers that are not finite are written as null.
    """

    def __init__(self, path: Path, fence: Callable[[], None] | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._fence = fence or (lambda: None)
        self._lost = 0
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
        """One logged update: `images_per_second` over all ranks, `phases` in seconds since the line before."""
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
        """One evaluation of the validation split; accuracies are shares."""
        self._append("evaluation", step=step, epoch=round(epoch, 4), top1=top1, top5=top5, loss=loss, **more)

    def event(self, event: str, **fields: Any) -> None:
        """Anything else: start (with step and total_steps), resumed (with step), checkpoint, bad_record, done..."""
        self._append("event", event=event, **fields)

    def close(self) -> None:
        """Safe to call twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> "EventLog":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _append(self, kind: str, **fields: Any) -> None:
        self._fence()
        line = (
            json.dumps(_replace_nonfinite({"time": round(time.time(), 3), "kind": kind, **fields}), allow_nan=False)
            + "\n"
        )
        data = (b"\n" if self._broken else b"") + line.encode()
        try:
            self._broken = os.write(self._descriptor, data) < len(data)
        except OSError as error:
            if not self._lost:
                logger.warning("%s: lines are being lost: %s", self._path, error.strerror)
            self._lost += 1


def read_records(path: Path, on_damaged: Callable[[bytes], object] = lambda line: None) -> Iterator[EventRecord]:
    """Every whole line of the log in the order written, one at a time; half lines of a killed writer are left out.

    on_damaged: is handed each line that cannot be read. Nothing comes where there is no such file.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            record = parse_record(line)
            if record is not None:
                yield record
            else:
                on_damaged(line)


def newest_step(path: Path) -> int:
    """The highest update among the last lines of the log; 0 where none is there."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            records = map(parse_record, file.read().splitlines())
            return max((r["step"] for r in records if r is not None and r["kind"] == "step"), default=0)
    except OSError:
        return 0


def parse_record(line: bytes) -> EventRecord | None:
    """The record of a line; None for half a line, or one that no writer of this log wrote."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        return None
    stepless = record["kind"] in ("step", "evaluation") and type(record.get("step")) is not int
    return None if stepless else record


class ReplayFilter:
    """The records as one undisturbed run would have written them, of those added so far.

    Where a launch began or continued at step n (`step` of its start or resumed event), what earlier launches logged
    of later steps is left out: those updates were lost and done again. So is a step or evaluation that comes again.
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
    """All of these records, see `Undisturbed`."""
    run = ReplayFilter()
    for record in records:
        run.add(record)
    return run.records


def _drop_from_step(records: list[EventRecord], kind: str, first: int) -> list[EventRecord]:
    """Without those of `kind` from step `first` on; the usual case, that there are none, costs a look at the end."""
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
    """Hands over the whole lines that were appended to a file since the last call; it may not exist yet.

    from_start: also those that stand in it already.
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
        *whole, self._rest = (self._rest + data).split(b"\n")
        return whole
