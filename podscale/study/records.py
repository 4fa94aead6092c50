"""What is known of a cell that has ended: one file a cell, which every study in the workspace shares."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from podscale.config import RunConfig, result_values
from podscale.config.identity import fingerprint
from podscale.runs import local_path
from podscale.util.files import write_json

TrialOutcome = Literal["done", "diverged"]


@dataclass(frozen=True)
class EvaluationPoint:
    """One evaluation of a training; loss is None where it was not finite."""

    step: int
    epoch: float
    top1: float
    loss: float | None = None


@dataclass(frozen=True)
class TrialRecord:
    """How a cell ended.

    settings: what the study set, by dotted name. code: commit or version of the code that ran it. training_loss: mean
    over the last epoch, in nats, label smoothing included. masked: updates left out because they were not finite.
    cpu_seconds: user and system, of all processes; 0 where it took more than one launch. date: in UTC.
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

    def steps_to_target(self, target: float) -> tuple[float, float] | None:
        """(updates, epochs) at which top-1 came to the target, by a straight line between evaluations; None: never."""
        before = EvaluationPoint(0, 0.0, 0.0)
        for point in self.curve:
            if point.top1 >= target:
                share = (target - before.top1) / (point.top1 - before.top1)
                steps, epochs = (before.step, point.step), (before.epoch, point.epoch)
                return (steps[0] + share * (steps[1] - steps[0]), epochs[0] + share * (epochs[1] - epochs[0]))
            before = point
        return None


def trial_key(config: RunConfig) -> str:
    """Names a cell by what changes its numbers, and so is a valid run.id for every study that needs the same run."""
    return f"cell-{fingerprint(result_values(config))}"


GetRecord = Callable[[str], TrialRecord | None]
"""The record of a cell, where there is one."""


class RecordStore:
    """The records of a workspace: <workspace>/studies/cells/<cell>.json, read when first asked for."""

    def __init__(self, workspace: str) -> None:
        self._studies = local_path(workspace) / "studies"
        self._folder = self._studies / "cells"
        self._cache: dict[str, TrialRecord] = {}

    def study_directory(self, study: str) -> Path:
        """Where the results of a study of this name go."""
        return self._studies / "results" / study

    def get(self, cell: str) -> TrialRecord | None:
        """The record of a cell, also where another process has just written it."""
        if cell not in self._cache:
            path = self._path(cell)
            if path.exists():
                self._cache[cell] = parse_record(path.read_text(encoding="utf-8"))
        return self._cache.get(cell)

    def add(self, record: TrialRecord) -> None:
        """Keeps the record, whole or not at all."""
        self._folder.mkdir(parents=True, exist_ok=True)
        write_json(self._path(record.cell), asdict(record))
        self._cache[record.cell] = record

    def delete(self, cell: str) -> None:
        """Forgets a cell, so that it is run again."""
        self._path(cell).unlink(missing_ok=True)
        self._cache.pop(cell, None)

    def _path(self, cell: str) -> Path:
        return self._folder / f"{cell}.json"


def parse_record(text: str) -> TrialRecord:
    """A record from its file; fields of another version are left out."""
    values = json.loads(text)
    known = {entry.name for entry in fields(TrialRecord)}
    kept = {name: value for name, value in values.items() if name in known}
    return TrialRecord(**{**kept, "curve": tuple(EvaluationPoint(**point) for point in kept.get("curve", ()))})
