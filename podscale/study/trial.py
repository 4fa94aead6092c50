"""One trial: its process and the record built from its run directory.

`python -m podscale.study.trial DOCUMENT SHARD_SET PARENT` trains as `podscale train` does, with the same exit codes.
If the document has an ensemble, its members are collapsed and evaluated together too. PARENT is the process ID of the
study; the trial exits when the study does.
"""

import json
import statistics
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from podscale.config import RunConfig
from podscale.errors import ExitCode, PodscaleError
from podscale.evaluation.evaluation_json import read_evaluation
from podscale.evaluation.history import RunHistory, finite_number, read_history
from podscale.runs import RunDirectory
from podscale.runs.ensemble_members import ensemble_members
from podscale.stages import local
from podscale.study.records import EvaluationPoint, TrialOutcome, TrialRecord
from podscale.study.sweep_series import Trial
from podscale.training.trainer import NONFINITE_MESSAGE
from podscale.util import processes
from podscale.util.processes import preempt_on_sigterm
from podscale.version import VERSION


def run_trial(arguments: list[str]) -> int:
    """Train and return the exit code; an error is the last line printed."""
    document, shard_set, parent = arguments
    processes.exit_with_process(int(parent))
    try:
        with preempt_on_sigterm():
            config = RunConfig.model_validate_json(Path(document).read_text(encoding="utf-8"))
            local.train(config, shard_set)
            members = ensemble_members(config)
            for member in members:
                local.train(member.config, shard_set)
            if members:
                local.evaluate(config, shard_set)
    except PodscaleError as error:
        print(error, file=sys.stderr, flush=True)
        return int(error.exit_code)
    return int(ExitCode.DONE)


def trial_outcome(exit_code: int, error: str, history: RunHistory) -> TrialOutcome | None:
    """Return the outcome; None if the trial stopped or failed and must run again.

    It is `diverged` if the steps or the last evaluation were not finite.
    """
    if exit_code == ExitCode.DONE and history.evaluations:
        return "done" if finite_number(history.evaluations[-1].get("loss")) is not None else "diverged"
    return "diverged" if NONFINITE_MESSAGE in error else None


def build_record(trial: Trial, ended: TrialOutcome, error: str, history: RunHistory, *, images: int) -> TrialRecord:
    """Build the record of a finished trial, without its cost; `images` is the size of the training split."""
    return TrialRecord(
        cell=trial.key,
        ended=ended,
        settings=dict(trial.settings),
        seed=trial.seed,
        error=error[-500:] if ended == "diverged" else "",
        code=_source_version(RunDirectory.for_config(trial.config)),
        images=images,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        **{
            **_result_fields(history, is_complete=ended == "done"),
            **(_ensemble_fields(trial.config) if ended == "done" else {}),
        },
    )


def _ensemble_fields(config: RunConfig) -> dict[str, Any]:
    """Return the TrialRecord fields of an ensemble, which replace those of the run in cycles; none without one."""
    if not config.ensemble.cycles:
        return {}
    evaluation = read_evaluation(RunDirectory.for_config(config).evaluation)
    members = () if evaluation.ensemble is None else evaluation.ensemble.members
    scores = evaluation.scores
    return {"top1": scores.top1, "loss": scores.loss, "members": tuple(member.answered.top1 for member in members)}


def trial_directories(config: RunConfig) -> list[Path]:
    """Return the run directories of a trial: its own, and those of the members of its ensemble."""
    configs = [config, *(member.config for member in ensemble_members(config))]
    return [RunDirectory.for_config(one).path for one in configs]


def read_trial_history(trial: Trial) -> RunHistory:
    return read_history(RunDirectory.for_config(trial.config).metrics)


def _result_fields(history: RunHistory, *, is_complete: bool) -> dict[str, Any]:
    """Return the TrialRecord fields read from metrics.jsonl; an incomplete training has no accuracy."""
    curve = tuple(
        EvaluationPoint(int(line["step"]), float(line["epoch"]), float(line["top1"]), finite_number(line.get("loss")))
        for line in history.evaluations
    )
    values: dict[str, Any] = {"curve": curve, "updates": int(history.steps[-1]["step"]) if history.steps else 0}
    if not is_complete:
        return values
    last_epoch = float(history.steps[-1]["epoch"]) - 1 if history.steps else 0.0
    losses = [
        loss
        for line in history.steps
        if line["epoch"] > last_epoch and (loss := finite_number(line["loss"])) is not None
    ]
    done = history.newest("done") or {}
    return values | {
        "top1": curve[-1].top1,
        "loss": curve[-1].loss,
        "training_loss": statistics.fmean(losses) if losses else None,
        "masked": int(done.get("skipped_updates", 0)),
    }


def _source_version(run: RunDirectory) -> str:
    """Return the commit that ran, or the version if it is unknown."""
    try:
        values = json.loads(run.environment.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return VERSION
    return str(values.get("commit") or values.get("podscale") or VERSION)


if __name__ == "__main__":
    sys.exit(run_trial(sys.argv[1:]))
