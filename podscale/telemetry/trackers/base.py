"""Tracker interface, points of metrics from the records of metrics.jsonl, and the record of points already sent."""

import json
import math
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from podscale.config import RunConfig
from podscale.errors import ExitCode
from podscale.runs import RunDirectory
from podscale.telemetry.events import EventRecord
from podscale.telemetry.phases import phase_fractions
from podscale.util.files import write_json

FAILURE_PREFIX = "failed: "
"""Begins the line in which a tracker's process says why it ends."""


@dataclass(frozen=True)
class LaunchExit:
    """Exit code and error of the launch that a tracker belongs to."""

    exit_code: int = int(ExitCode.FAILED)
    error: str = ""

    def to_line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def parse(cls, line: bytes) -> "LaunchExit":
        """Of `line()`; a failure where nothing was said."""
        return cls(**json.loads(line)) if line.strip() else cls()


class Tracker(Protocol):
    """Takes the records of a run, from the first one in every launch.

    location: a place to look at, for people.
    """

    location: str

    def add(self, record: EventRecord) -> None:
        """Takes the next record; cheap."""

    def flush(self) -> None:
        """Passes on what was added. Called every second, also where nothing is new."""

    def close(self, launch_exit: LaunchExit) -> None:
        """The launch has ended; nothing more will come."""


STEP_METRICS = {
    "train/loss": "loss",
    "train/learning_rate": "learning_rate",
    "train/epoch": "epoch",
    "throughput/images_per_second": "images_per_second",
}
EVALUATION_METRICS = {
    "evaluation/top1": "top1",
    "evaluation/top5": "top5",
    "evaluation/loss": "loss",
    "evaluation/images_per_second": "images_per_second",
}
GOODPUT_METRICS = {"goodput/ratio": "goodput", "goodput/wall_seconds": "wall_seconds"}


@dataclass(frozen=True)
class TrackerPoint:
    """Figures after `step` updates, at `time` in unix seconds; kind: step, evaluation or goodput."""

    kind: str
    step: int
    time: float
    values: Mapping[str, float]


class PointBuilder:
    """Makes points of records, which it must see in their order. Where a figure was not finite, it is NaN."""

    def __init__(self) -> None:
        self._step = 0

    def point(self, record: EventRecord) -> TrackerPoint | None:
        """The figures of a record; None where it has none."""
        self._step = record.get("step", self._step)
        match record["kind"], record.get("event"):
            case "step", _:
                busy = phase_fractions(record.get("phases") or {})
                values = _values(STEP_METRICS, record) | {f"phases/{name}": share for name, share in busy.items()}
            case "evaluation", _:
                values = _values(EVALUATION_METRICS, record)
            case _, "goodput":
                values = _values(GOODPUT_METRICS, record)
            case _:
                return None
        return TrackerPoint(str(record.get("event", record["kind"])), self._step, float(record["time"]), values)


def launch_step(record: EventRecord) -> int | None:
    """The updates after which a launch of the run begins with this record; None where none does.

    What former launches told of later updates is void: those are done again.
    """
    return int(record.get("step") or 0) if record.get("event") in ("start", "resumed") else None


def _values(names: Mapping[str, str], record: EventRecord) -> dict[str, float]:
    return {shown: _number(record[name]) for shown, name in names.items() if name in record}


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


DEFAULT_PROJECT = "podscale"
"""Of what trackers call a project or an experiment."""


class SentPoints:
    """The tracker's own name of a run, and the newest update that it has of each kind: a file of the run directory.

    Updates that were lost and are done again come out the same, so it is no loss that their first figures stay.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.id = ""
        self._newest_steps: dict[str, int] = {}
        if path.exists():
            found = json.loads(path.read_text(encoding="utf-8"))
            self.id, self._newest_steps = str(found["id"]), dict(found["newest"])
        self._taken_steps = dict(self._newest_steps)
        self._saved_steps = dict(self._newest_steps)

    @classmethod
    def for_run(cls, run: RunDirectory, tracker: str) -> "SentPoints":
        return cls(run.trackers / f"{tracker}.json")

    def take(self, point: TrackerPoint) -> bool:
        """Whether this point is to be sent: it was not, nor is it on its way, nor is one of a later update."""
        if point.step <= self._taken_steps.get(point.kind, -1):
            return False
        self._taken_steps[point.kind] = point.step
        return True

    def mark_sent(self, point: TrackerPoint) -> None:
        """It need not be sent again by later launches."""
        self._newest_steps[point.kind] = point.step

    def save(self) -> None:
        """Keeps what has arrived, where that is news."""
        if self._newest_steps != self._saved_steps:
            self.save_id(self.id)

    def save_id(self, name: str) -> None:
        """Keeps the tracker's name of the run too."""
        self.id = name
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self._path, {"id": self.id, "newest": self._newest_steps})
        self._saved_steps = dict(self._newest_steps)


def new_run_name(config: RunConfig) -> str:
    """A name for a run that no other run has, for people to recognise."""
    return f"{config.run.id}-{secrets.token_hex(4)}"
