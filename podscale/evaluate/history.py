"""What metrics.jsonl tells: the curves of a run, put in order after restarts, and totals over all its launches."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class History:
    """The run's log.

    steps: "step" lines by rising step; where a restart redid steps, the newer line counts.
    evaluations: "evaluation" lines by rising step, likewise. events: all "event" lines as they came.
    phases: seconds by phase over all launches, redone steps included (they cost time too).
    seconds: from the first to the last line of each launch, summed: the time between launches is not in it.
    damaged: lines that are no JSON object (the last one of a killed writer, usually).
    """

    steps: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    phases: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    damaged: int = 0

    def __bool__(self) -> bool:
        return bool(self.steps or self.evaluations or self.events)

    def images_per_second(self, global_batch: int) -> float | None:
        """Throughput of the updates themselves: images over seconds, over all logged steps; None without any."""
        images, seconds, before = 0.0, 0.0, 0
        for line in self.steps:
            rate, step = number(line.get("images_per_second")), int(line["step"])
            if rate:
                images += (step - before) * global_batch
                seconds += (step - before) * global_batch / rate
            before = step
        return images / seconds if seconds else None

    def count(self, event: str) -> int:
        """How often `event` happened."""
        return sum(line.get("event") == event for line in self.events)


def read_history(path: Path) -> History:
    """The history in metrics.jsonl; empty where there is no such file. Lines that cannot be read are counted."""
    try:
        text = path.read_bytes().decode("utf-8", errors="replace")
    except OSError:
        return History()
    return parse_history(text.splitlines())


def parse_history(lines: Iterable[str]) -> History:
    """The history in these lines of metrics.jsonl."""
    entries, damaged = [], 0
    for line in lines:
        entry = _entry(line)
        if entry is None:
            damaged += 1
        else:
            entries.append(entry)
    phases: dict[str, float] = {}
    for entry in entries:
        for name, value in (entry.get("phases") or {}).items():
            phases[name] = phases.get(name, 0.0) + (number(value) or 0.0)
    return History(
        steps=_newest_by_step(entries, "step"),
        evaluations=_newest_by_step(entries, "evaluation"),
        events=[entry for entry in entries if entry["kind"] == "event"],
        phases=phases,
        seconds=sum(_launch_seconds(entries)),
        damaged=damaged,
    )


def number(value: Any) -> float | None:
    """`value` as a finite float; None where it is none (a diverged run logs NaN, which JSON may carry as a word)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < float("inf") else None


def _entry(line: str) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    if not isinstance(entry, dict) or not isinstance(entry.get("kind"), str):
        return None
    if entry["kind"] in ("step", "evaluation") and number(entry.get("step")) is None:
        return None
    return entry


def _newest_by_step(entries: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """Lines of one kind by step. A line of an earlier step says that all later ones before it were redone."""
    kept: list[dict[str, Any]] = []
    for entry in entries:
        if entry["kind"] == kind:
            while kept and kept[-1]["step"] >= entry["step"]:
                kept.pop()
            kept.append(entry)
    return kept


def _launch_seconds(entries: list[dict[str, Any]]) -> Iterator[float]:
    """Seconds of each launch; one begins with a "start" or "resumed" event, or with both together."""
    first = last = None
    opening = False
    for entry in entries:
        opens = entry["kind"] == "event" and entry.get("event") in ("start", "resumed")
        if opens and not opening and first is not None and last is not None:
            yield last - first
            first = last = None
        opening = opens
        time = number(entry.get("time"))
        if time is not None:
            first, last = (time if first is None else first), time
    if first is not None and last is not None:
        yield last - first
