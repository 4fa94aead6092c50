"""Training history from metrics.jsonl: curves without repeated steps, and totals over all launches."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from podscale.telemetry.events import EventRecord, ReplayFilter, parse_record

MAX_STEP_RECORDS = 4096
"""Step records kept of a longer run, at least; more than a curve has pixels."""


@dataclass(frozen=True)
class RunHistory:
    """Log of a run.

    Args:
        steps: "step" records by rising step; the newer record of a repeated step.
        evaluations: "evaluation" records, likewise.
        events: All "event" records in the order of the file.
        phases: Seconds by phase over all launches, repeated steps included.
        seconds: Wall time from the first to the last record of each launch, summed.
        damaged: Number of lines that are no valid record, usually the last one of a killed writer.
    """

    steps: list[EventRecord] = field(default_factory=list)
    evaluations: list[EventRecord] = field(default_factory=list)
    events: list[EventRecord] = field(default_factory=list)
    phases: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    damaged: int = 0

    def __bool__(self) -> bool:
        return bool(self.steps or self.evaluations or self.events)

    def images_per_second(self) -> float | None:
        """Return the throughput over all logged steps; None without any."""
        batches = self._batches()
        images, seconds, previous = 0.0, 0.0, 0
        for record in self.steps:
            rate, step = finite_number(record.get("images_per_second")), int(record["step"])
            if rate:
                count = _count_images(batches, previous, step)
                images += count
                seconds += count / rate
            previous = step
        return images / seconds if seconds else None

    def _batches(self) -> dict[int, float]:
        """Return the global batch by the number of steps before its first step; an unknown constant one counts as 1."""
        logged = [(event.get("step"), finite_number(event.get("global_batch"))) for event in self.events]
        known = {step: batch for step, batch in logged if isinstance(step, int) and batch}
        return {0: known[min(known)] if known else 1.0, **dict(sorted(known.items()))}

    def newest(self, event: str) -> EventRecord | None:
        return next((record for record in reversed(self.events) if record.get("event") == event), None)

    def count(self, event: str) -> int:
        return sum(record.get("event") == event for record in self.events)


def read_history(path: Path) -> RunHistory:
    """Read the history from metrics.jsonl; empty if the file cannot be read."""
    try:
        with path.open("rb") as file:
            return parse_history(file)
    except OSError:
        return RunHistory()


def parse_history(lines: Iterable[bytes]) -> RunHistory:
    reader = _HistoryReader()
    for line in lines:
        reader.add_line(line)
    return reader.history()


def finite_number(value: Any) -> float | None:
    """Return `value` as a finite float; None for NaN, infinity and other types."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < float("inf") else None


def _count_images(batches: dict[int, float], start: int, stop: int) -> float:
    """Return the images of the steps after `start` up to `stop`; `batches` is sorted by the first step."""
    ends = [*list(batches)[1:], stop]
    return sum(
        max(0, min(stop, end) - max(start, begin)) * batch
        for (begin, batch), end in zip(batches.items(), ends, strict=True)
    )


class _HistoryReader:
    """Reader that builds a history, in memory that does not grow with the length of the run."""

    def __init__(self) -> None:
        self._run = ReplayFilter()
        self._events: list[EventRecord] = []
        self._phases: dict[str, float] = {}
        self._clock = _LaunchClock()
        self._damaged = 0
        self._steps = 0

    def add_line(self, line: bytes) -> None:
        record = parse_record(line)
        if record is None:
            self._damaged += 1
            return
        self._clock.add(record)
        for name, value in (record.get("phases") or {}).items():
            self._phases[name] = self._phases.get(name, 0.0) + (finite_number(value) or 0.0)
        self._run.add(record)
        if record["kind"] == "event":
            self._events.append(record)
        self._steps += record["kind"] == "step"
        if self._steps >= 2 * MAX_STEP_RECORDS:
            self._run.records = _thin(self._run.records)
            self._steps = sum(entry["kind"] == "step" for entry in self._run.records)

    def history(self) -> RunHistory:
        return RunHistory(
            steps=[entry for entry in self._run.records if entry["kind"] == "step"],
            evaluations=[entry for entry in self._run.records if entry["kind"] == "evaluation"],
            events=self._events,
            phases=self._phases,
            seconds=self._clock.seconds(),
            damaged=self._damaged,
        )


def _thin(records: list[EventRecord]) -> list[EventRecord]:
    """Merge pairs of step records; a merged rate covers the steps of both, so that throughput stays exact."""
    merged: list[EventRecord] = []
    previous_step, first = 0, None
    for record in records:
        if record["kind"] != "step":
            merged.append(record)
        elif first is None:
            first = record
        else:
            merged.append(_merge_steps(previous_step, first, record))
            previous_step, first = record["step"], None
    return [*merged, first] if first is not None else merged


def _merge_steps(previous_step: int, first: EventRecord, second: EventRecord) -> EventRecord:
    """Merge two neighbouring step records; `previous_step` is the step before them."""
    rates = [finite_number(record.get("images_per_second")) for record in (first, second)]
    steps = [first["step"] - previous_step, second["step"] - first["step"]]
    known = [(count, rate) for count, rate in zip(steps, rates, strict=True) if rate and count > 0]
    if not known:
        return second
    rate = sum(count for count, _ in known) / sum(count / rate for count, rate in known)
    return {**second, "images_per_second": rate}


class _LaunchClock:
    """Wall time of all launches; a launch begins with the event "start" or "resumed", or with both."""

    def __init__(self) -> None:
        self._total = 0.0
        self._first: float | None = None
        self._last: float | None = None
        self._opening = False

    def add(self, record: EventRecord) -> None:
        if record.get("event") == "evaluated":
            return  # written by the stage after training
        opens = record["kind"] == "event" and record.get("event") in ("start", "resumed")
        if opens and not self._opening:
            self._total, self._first, self._last = self.seconds(), None, None
        self._opening = opens
        time = finite_number(record.get("time"))
        if time is not None:
            self._first, self._last = (time if self._first is None else self._first), time

    def seconds(self) -> float:
        if self._first is None or self._last is None:
            return self._total
        return self._total + self._last - self._first
