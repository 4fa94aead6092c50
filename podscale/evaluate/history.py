"""What metrics.jsonl tells: the curves of a run, put in order after restarts, and totals over all its launches."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from podscale.telemetry.events import Record, parse_record, undisturbed


@dataclass(frozen=True)
class History:
    """The run's log.

    steps: "step" lines by rising step; where a restart redid steps, the newer line counts.
    evaluations: "evaluation" lines by rising step, likewise. events: all "event" lines as they came.
    phases: seconds by phase over all launches, redone steps included (they cost time too).
    seconds: from the first to the last line of each launch, summed: the time between launches is not in it.
    damaged: lines that are no JSON object (the last one of a killed writer, usually).
    """

    steps: list[Record] = field(default_factory=list)
    evaluations: list[Record] = field(default_factory=list)
    events: list[Record] = field(default_factory=list)
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

    def newest(self, event: str) -> Record | None:
        """The last of these events."""
        return next((line for line in reversed(self.events) if line.get("event") == event), None)

    def count(self, event: str) -> int:
        """How often `event` happened."""
        return sum(line.get("event") == event for line in self.events)


def read_history(path: Path) -> History:
    """The history in metrics.jsonl; empty where there is no such file. Lines that cannot be read are counted."""
    try:
        return parse_history(path.read_bytes().splitlines())
    except OSError:
        return History()


def parse_history(lines: Iterable[bytes]) -> History:
    """The history in these lines of metrics.jsonl."""
    parsed = [parse_record(line) for line in lines]
    entries = [entry for entry in parsed if entry is not None]
    kept = undisturbed(entries)
    phases: dict[str, float] = {}
    for entry in entries:
        for name, value in (entry.get("phases") or {}).items():
            phases[name] = phases.get(name, 0.0) + (number(value) or 0.0)
    return History(
        steps=[entry for entry in kept if entry["kind"] == "step"],
        evaluations=[entry for entry in kept if entry["kind"] == "evaluation"],
        events=[entry for entry in entries if entry["kind"] == "event"],
        phases=phases,
        seconds=sum(_launch_seconds(entries)),
        damaged=len(parsed) - len(entries),
    )


def number(value: Any) -> float | None:
    """`value` as a finite float; None where it is none (a diverged run logs NaN, which JSON may carry as a word)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < float("inf") else None


def _launch_seconds(entries: list[Record]) -> Iterator[float]:
    """Seconds of each launch; one begins with a "start" or "resumed" event, or with both together."""
    first = last = None
    opening = False
    for entry in entries:
        if entry.get("event") == "evaluated":
            continue  # the stage after training writes this
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
