"""Records of finished trials, one file each, shared by all studies of a workspace."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from podscale.config import RunConfig
from podscale.config.identity import changed_result_values, fingerprint
from podscale.runs import local_path
from podscale.util.files import write_json

TrialOutcome = Literal["done", "diverged"]


@dataclass(frozen=True)
class EvaluationPoint:
    """Evaluation of a training; loss is None if it was not finite."""

    step: int
    epoch: float
    top1: float
    loss: float | None = None


@dataclass(frozen=True)
class TrialRecord:
    """Result of one trial.

    Args:
        cell: Key of the trial.
        settings: Options set by the study, by dotted name.
        code: Commit or version of the code that ran it.
        training_loss: Mean over the last epoch, nats, label smoothing included.
        updates: Training steps.
        masked: Steps skipped because the loss or a gradient was not finite.
        cpu_seconds: User and system time of all processes; 0 if the trial took more than one launch.
        date: UTC, ISO 8601.
        members: Top-1 of each member; `top1` and `loss` are then those of the ensemble, and the curve is that of the
            run in cycles.
    """

    cell: str
    ended: TrialOutcome
    settings: dict[str, Any]
    seed: int
    error: str = ""
    code: str = ""
    top1: float | None = None
    loss: float | None = None
    training_loss: float | None = None
    updates: int = 0
    images: int = 0
    masked: int = 0
    curve: tuple[EvaluationPoint, ...] = field(default=())
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    date: str = ""
    members: tuple[float, ...] = ()

    @property
    def is_measured(self) -> bool:
        """True if the training finished and its cost is known."""
        return self.ended == "done" and self.seconds > 0 and self.cpu_seconds > 0

    def steps_to_target(self, target: float) -> tuple[float, float] | None:
        """Return (steps, epochs) at which top-1 reached the target, interpolated linearly; None if it never did."""
        before = EvaluationPoint(0, 0.0, 0.0)
        for point in self.curve:
            if point.top1 >= target:
                fraction = (target - before.top1) / (point.top1 - before.top1)
                steps = before.step + fraction * (point.step - before.step)
                return steps, before.epoch + fraction * (point.epoch - before.epoch)
            before = point
        return None


def trial_key(config: RunConfig) -> str:
    """Return a hash of the options that affect the result, valid as run.id, so that studies share equal trials.

    Options at their defaults do not count, so that records stay valid in a version with more options.
    """
    return f"cell-{fingerprint(changed_result_values(config))}"


GetRecord = Callable[[str], TrialRecord | None]
"""Returns the record of a trial by its key, if there is one."""


class RecordStore:
    """Records of a workspace: <workspace>/studies/cells/<key>.json, read on first use."""

    def __init__(self, workspace: str) -> None:
        self._studies = local_path(workspace) / "studies"
        self._folder = self._studies / "cells"
        self._cache: dict[str, TrialRecord] = {}

    def study_directory(self, study: str) -> Path:
        return self._studies / "results" / study

    def get(self, key: str) -> TrialRecord | None:
        """Return the record of a trial, also one that another process has just written."""
        path = self._path(key)
        if key not in self._cache and path.exists():
            self._cache[key] = parse_record(json.loads(path.read_text(encoding="utf-8")))
        return self._cache.get(key)

    def add(self, record: TrialRecord) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        write_json(self._path(record.cell), asdict(record))
        self._cache[record.cell] = record

    def delete(self, key: str) -> None:
        """Delete the record of a trial, so that it runs again."""
        self._path(key).unlink(missing_ok=True)
        self._cache.pop(key, None)

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}.json"


def parse_record(content: Mapping[str, Any]) -> TrialRecord:
    """Parse the content of a record file; ignore the fields of other versions."""
    names = {entry.name for entry in fields(TrialRecord)}
    values = {name: value for name, value in content.items() if name in names}
    curve = tuple(EvaluationPoint(**point) for point in values.get("curve", ()))
    return TrialRecord(**{**values, "curve": curve, "members": tuple(values.get("members", ()))})
