"""Tracker interface, metric points made of the records of metrics.jsonl, and the store of points already sent."""

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
"""Prefix of the line that has the error of a tracker process."""
DEFAULT_PROJECT = "podscale"
"""Default project or experiment."""


@dataclass(frozen=True)
class LaunchExit:
    """Exit code and error of the launch that a tracker belongs to."""

    exit_code: int = int(ExitCode.FAILED)
    error: str = ""

    def to_line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def parse(cls, line: bytes) -> "LaunchExit":
        """Parse what `to_line` returned; an empty line is a failure."""
        return cls(**json.loads(line)) if line.strip() else cls()


class Tracker(Protocol):
    """Receiver of all records of a run; every launch starts again with the first record.

    Args:
        location: Directory or URL to show to the user.
    """

    location: str

    def add(self, record: EventRecord) -> None:
        """Add the next record; must be cheap."""

    def flush(self) -> None:
        """Send the added records; called every second."""

    def close(self, launch_exit: LaunchExit) -> None:
        """Send the remaining records and the exit of the launch."""


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
    """Metrics after `step` steps. `kind` is step, evaluation or goodput, `time` is in unix seconds."""

    kind: str
    step: int
    time: float
    values: Mapping[str, float]


class PointBuilder:
    """Builder of points from records, which must come in order; a non-finite value is NaN."""

    def __init__(self) -> None:
        self._step = 0

    def point(self, record: EventRecord) -> TrackerPoint | None:
        """Return the metrics of a record; None if it has none."""
        self._step = record.get("step", self._step)
        match record["kind"], record.get("event"):
            case "step", _:
                fractions = phase_fractions(record.get("phases") or {})
                values = _values(STEP_METRICS, record) | {f"phases/{name}": part for name, part in fractions.items()}
            case "evaluation", _:
                values = _values(EVALUATION_METRICS, record)
            case _, "goodput":
                values = _values(GOODPUT_METRICS, record)
            case _:
                return None
        return TrackerPoint(str(record.get("event", record["kind"])), self._step, float(record["time"]), values)


def launch_step(record: EventRecord) -> int | None:
    """Return the step that a launch continues from if this is its first record, else None."""
    return int(record.get("step") or 0) if record.get("event") in ("start", "resumed") else None


def _values(names: Mapping[str, str], record: EventRecord) -> dict[str, float]:
    return {shown: _number(record[name]) for shown, name in names.items() if name in record}


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


class SentPoints:
    """The tracker's id of the run and the newest step sent of each kind, stored in the run directory.

    A repeated step has the same metrics, so it is not sent again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.id = ""
        self._newest_steps: dict[str, int] = {}
        if path.exists():
            stored = json.loads(path.read_text(encoding="utf-8"))
            self.id, self._newest_steps = str(stored["id"]), dict(stored["newest"])
        self._taken_steps = dict(self._newest_steps)
        self._saved_steps = dict(self._newest_steps)

    @classmethod
    def for_run(cls, run: RunDirectory, tracker: str) -> "SentPoints":
        return cls(run.trackers / f"{tracker}.json")

    def take(self, point: TrackerPoint) -> bool:
        """Return whether to send this point: only if none of its kind was taken for this step or a later one."""
        if point.step <= self._taken_steps.get(point.kind, -1):
            return False
        self._taken_steps[point.kind] = point.step
        return True

    def mark_sent(self, point: TrackerPoint) -> None:
        """Mark the point as received, so that later launches skip it."""
        self._newest_steps[point.kind] = point.step

    def save(self) -> None:
        """Write the file if it has changed."""
        if self._newest_steps != self._saved_steps:
            self.save_id(self.id)

    def save_id(self, name: str) -> None:
        self.id = name
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self._path, {"id": self.id, "newest": self._newest_steps})
        self._saved_steps = dict(self._newest_steps)


def new_run_name(config: RunConfig) -> str:
    return f"{config.run.id}-{secrets.token_hex(4)}"
