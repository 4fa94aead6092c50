"""Records of metrics.jsonl in the format of a run."""

from typing import Any

from podscale.telemetry.events import EventRecord


def launch_record(step: int, time: float = 100.0) -> EventRecord:
    """Return the record of a launch's start; a resumed launch if `step` is above 0."""
    return {"time": time, "kind": "event", "event": "resumed" if step else "start", "step": step, "total_steps": 50}


def step_record(step: int, loss: float | None = 1.0, **more: Any) -> EventRecord:
    values = {"epoch": step / 10, "loss": loss, "learning_rate": 0.1, "images_per_second": 1000.0}
    phases = {"data_wait": 1.0, "other": 3.0}
    return {"time": 100.0 + step, "kind": "step", "step": step, **values, "phases": phases, **more}


def evaluation_record(step: int, top1: float = 0.5) -> EventRecord:
    return {"time": 100.0 + step, "kind": "evaluation", "step": step, "top1": top1, "top5": 0.9, "loss": 0.5}
