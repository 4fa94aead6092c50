"""Data of the report, read from the run directory and the shard set."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from podscale.config import RunConfig, loads
from podscale.data.shard_set import ShardSet
from podscale.errors import ExitCode, InputError
from podscale.evaluation.evaluation_json import Evaluation, read_evaluation
from podscale.evaluation.history import RunHistory, read_history
from podscale.runs import RunDirectory, StageOutcome, read_outcomes
from podscale.runs.predictions import Predictions, read_predictions

STAGES = ("shard", "train", "evaluate")
MAX_REJECTS = 12

T = TypeVar("T")


@dataclass(frozen=True)
class MissingPart:
    """Part that the report cannot show, with the reason."""

    part: str
    reason: str


@dataclass
class ReportData:
    """Data of one report; missing parts are None or empty (see `missing`)."""

    run: RunDirectory
    config: RunConfig | None = None
    config_text: str = ""
    outcomes: dict[str, StageOutcome] = field(default_factory=dict)
    history: RunHistory = field(default_factory=RunHistory)
    evaluation: Evaluation | None = None
    predictions: Predictions | None = None
    shards: ShardSet | None = None
    rejects: list[dict[str, Any]] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    missing: list[MissingPart] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.config.run.id if self.config else self.run.path.name

    @property
    def failed_stage(self) -> StageOutcome | None:
        return next((self.outcomes[s] for s in STAGES if s in self.outcomes and not self.outcomes[s].is_done), None)

    @property
    def classes(self) -> list[str]:
        if self.shards is not None:
            return self.shards.classes
        return [entry.name for entry in self.evaluation.per_class] if self.evaluation else []


def read_report_data(run_directory: Path, shard_set: ShardSet | Path | str | None) -> ReportData:
    """Read all parts of the run; missing or damaged parts raise no error."""
    run = RunDirectory(run_directory)
    data = ReportData(run, outcomes=read_outcomes(run.outcome), history=read_history(run.metrics))
    document = "the run document"
    data.config_text = _read_part(data, document, "shard", run.config, lambda p: p.read_text(encoding="utf-8")) or ""
    if data.config_text:
        data.config = _read_part(data, document, "shard", run.config, lambda p: loads(data.config_text, str(p)))
    data.shards = _open_shards(data, shard_set)
    if not data.history:
        _add_missing(data, "the training curves", "train", "metrics.jsonl is empty")
    data.evaluation = _read_part(data, "the scores", "evaluate", run.evaluation, read_evaluation)
    data.predictions = _read_part(data, "the predictions", "evaluate", run.predictions, read_predictions)
    data.environment = _read_part(data, "the environment", "train", run.environment, _read_json_object) or {}
    data.model = _read_part(data, "the model", "train", run.model / "model.json", _read_json_object) or {}
    _drop_mismatched(data)
    return data


def read_rejects(directory: Path, limit: int) -> list[dict[str, Any]]:
    """Read at most `limit` rejected images, as recorded by the shard stage."""
    try:
        with (directory / "rejects.jsonl").open("rb") as file:
            lines = list(islice(file, limit))
        entries = [json.loads(line.decode("utf-8", "replace")) for line in lines]
    except (OSError, ValueError):
        return []
    return [entry for entry in entries if isinstance(entry, dict)]


def describe_exit(outcome: StageOutcome) -> str:
    if outcome.is_done:
        return "done before" if outcome.reused else "done"
    words = {
        ExitCode.BAD_INPUT: "refused its input",
        ExitCode.PREEMPTED: "was stopped after saving",
        ExitCode.HANG: "hung",
        ExitCode.PEER_LOST: "lost a rank",
        130: "was interrupted",
    }
    return f"{words.get(outcome.exit_code, 'failed')} (exit code {outcome.exit_code})"


def _open_shards(data: ReportData, shard_set: ShardSet | Path | str | None) -> ShardSet | None:
    if shard_set is None:
        _add_missing(data, "the data", "shard", "no shard set was given")
        return None
    try:
        shards = shard_set if isinstance(shard_set, ShardSet) else ShardSet.open(shard_set)
    except InputError as error:
        _add_missing(data, "the data", "shard", str(error))
        return None
    data.rejects = read_rejects(shards.directory, MAX_REJECTS)
    return shards


def _drop_mismatched(data: ReportData) -> None:
    """Drop scores and predictions of another class map, which would have wrong class names."""
    manifest = data.shards.manifest if data.shards else None
    if data.evaluation and manifest and data.evaluation.identity.classes_sha256 != manifest.classes_sha256:
        reason = "evaluation.json belongs to another class map than the shard set; evaluate again"
        data.missing.append(MissingPart("the scores", reason))
        data.evaluation = None
    if data.evaluation is None:
        data.predictions = None


def _read_part(data: ReportData, part: str, stage: str, path: Path, read: Callable[[Path], T]) -> T | None:
    try:
        return read(path)
    except (InputError, OSError, ValueError) as error:
        _add_missing(data, part, stage, str(error) if path.exists() else f"{path.name} does not exist")
        return None


def _add_missing(data: ReportData, part: str, stage: str, problem: str) -> None:
    """Add a missing part; if its stage or an earlier one failed, that failure is the reason."""
    for name in STAGES[: STAGES.index(stage) + 1]:
        outcome = data.outcomes.get(name)
        if outcome is not None and not outcome.is_done:
            problem = f"stage {name} {describe_exit(outcome)}: {outcome.error or 'no message was recorded'}"
            break
    else:
        if stage not in data.outcomes:
            problem = f"no outcome of stage {stage} is recorded; {problem}"
    data.missing.append(MissingPart(part, problem))


def _read_json_object(path: Path) -> dict[str, Any]:
    value = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise ValueError(f"{path.name}: not a JSON object")
    return value
