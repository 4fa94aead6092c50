"""From the run directory of a cell to its record.

The process of one cell: `python -m podscale.study.trial DOCUMENT SHARD_SET PARENT`.

Trains as `podscale train` does; ends with the study that started it, and with the exit codes of every stage.
"""

import json
import statistics
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from podscale.config import RunConfig
from podscale.errors import ExitCode, PodscaleError
from podscale.evaluation.history import RunHistory, finite_number, read_history
from podscale.runs import RunDirectory
from podscale.stages import local
from podscale.study.grid import Trial
from podscale.study.records import EvaluationPoint, TrialOutcome, TrialRecord
from podscale.training.trainer import NONFINITE_MESSAGE
from podscale.util import processes
from podscale.util.processes import preempt_on_sigterm
from podscale.version import VERSION


def run_trial(arguments: list[str]) -> int:
    """Trains; what it says of a failure is the last line that it prints."""
    document, shard_set, parent = arguments
    processes.exit_with_process(int(parent))
    try:
        with preempt_on_sigterm():
            config = RunConfig.model_validate_json(Path(document).read_text(encoding="utf-8"))
            local.train(config, shard_set)
    except PodscaleError as error:
        print(error, file=sys.stderr, flush=True)
        return int(error.exit_code)
    return int(ExitCode.DONE)


if __name__ == "__main__":
    sys.exit(run_trial(sys.argv[1:]))


def trial_outcome(exit_code: int, error: str, history: RunHistory) -> TrialOutcome | None:
    """How a cell ended as a result; None where it was stopped or an accident ended it, so that it is to be run again.

    Diverged is a training whose updates were not finite, and one whose last evaluation was not.
    """
    if exit_code == ExitCode.DONE and history.evaluations:
        return "done" if finite_number(history.evaluations[-1].get("loss")) is not None else "diverged"
    return "diverged" if NONFINITE_MESSAGE in error else None


def build_record(trial: Trial, ended: TrialOutcome, error: str, history: RunHistory, *, images: int) -> TrialRecord:
    """The record of a cell that ended, but for what it cost. images: of the training split."""
    return TrialRecord(
        cell=trial.key,
        ended=ended,
        settings=dict(trial.settings),
        seed=trial.seed,
        error=error[-500:] if ended == "diverged" else "",
        code=_source_version(RunDirectory.for_config(trial.config)),
        images=images,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        **_result_fields(history, is_complete=ended == "done"),
    )


def read_trial_history(trial: Trial) -> RunHistory:
    return read_history(RunDirectory.for_config(trial.config).metrics)


def _result_fields(history: RunHistory, *, is_complete: bool) -> dict[str, Any]:
    """What metrics.jsonl tells, as fields of a Record; a training that did not end well has no accuracy."""
    curve = tuple(
        EvaluationPoint(int(line["step"]), float(line["epoch"]), float(line["top1"]), finite_number(line.get("loss")))
        for line in history.evaluations
    )
    found: dict[str, Any] = {"curve": curve, "updates": int(history.steps[-1]["step"]) if history.steps else 0}
    if not is_complete:
        return found
    last_epoch = float(history.steps[-1]["epoch"]) - 1 if history.steps else 0.0
    losses = [
        loss
        for line in history.steps
        if line["epoch"] > last_epoch and (loss := finite_number(line["loss"])) is not None
    ]
    done = history.newest("done") or {}
    return found | {
        "top1": curve[-1].top1,
        "loss": curve[-1].loss,
        "training_loss": statistics.fmean(losses) if losses else None,
        "masked": int(done.get("skipped_updates", 0)),
    }


def _source_version(run: RunDirectory) -> str:
    """The commit that ran, else the version."""
    try:
        found = json.loads(run.environment.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return VERSION
    return str(found.get("commit") or found.get("podscale") or VERSION)
