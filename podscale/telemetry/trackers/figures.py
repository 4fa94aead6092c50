"""Records of metrics.jsonl as figures with the names under which trackers show them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from podscale.telemetry.events import EventRecord
from podscale.telemetry.phases import phase_fractions

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
