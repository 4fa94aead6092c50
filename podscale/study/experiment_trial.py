"""Trial of an optimizer such as Katib: `python -m podscale.study.experiment_trial`, in the trial's own pod.

The environment has the study and the parameters that the optimizer chose. The trial trains with every seed of the
study, and prints the mean results as `name=value`, which Katib's metrics collector reads from the output. Trainings
that have a record in the workspace are not repeated, and `podscale study` shows the records of all trials.
"""

import math
import os
import sys
from collections.abc import Mapping, Sequence

from podscale.errors import ExitCode, PodscaleError
from podscale.runs.lease import Lease
from podscale.study.document import StudyDocument
from podscale.study.grid import TrialGrid
from podscale.study.records import RecordStore, TrialRecord
from podscale.study.runner import StudyRunner
from podscale.study.search_space import narrow_study
from podscale.study.sweep_series import Trial, known_records
from podscale.util import env
from podscale.util.processes import preempt_on_sigterm

OBJECTIVE, LOSS = "top1", "loss"
"""Names of the printed results: top-1 of the last evaluation as a fraction, and its loss."""
SHARDS_LEASE = "shards.lease"
SHARDS_WAIT_SECONDS = 24 * 3600.0
"""Timeout for another trial to build the shard set, seconds."""


def run_experiment_trial(environ: Mapping[str, str] = os.environ) -> dict[str, float]:
    """Train with the chosen parameters; return the mean results over the seeds.

    A training that diverged counts with a top-1 of 0, and leaves the loss out.

    Raises:
        PodscaleError: A training failed.
    """
    study = StudyDocument.model_validate_json(environ[env.STUDY])
    chosen = TrialGrid(narrow_study(study, parse_choice(environ[env.TRIAL])))
    records = RecordStore(chosen.workspace)
    runner = StudyRunner(TrialGrid(study), records, jobs=1, series=chosen.series, on_trial_end=_print_trial)
    directory = runner.study_directory
    directory.mkdir(parents=True, exist_ok=True)
    lease = Lease.hold(directory / SHARDS_LEASE, wait_seconds=SHARDS_WAIT_SECONDS)  # trials start at the same time
    try:
        runner.prepare()
    finally:
        lease.release()
    runner.run()
    if runner.failures:
        listing = "\n".join(f"{name}: {error}" for name, error in runner.failures.items())
        raise PodscaleError(f"{len(runner.failures)} trainings failed:\n{listing}", field="trial")
    return mean_results(known_records(list(chosen.known_trials(records.get).values()), records.get))


def parse_choice(text: str) -> dict[str, str]:
    """Return the parameters of the lines `name=value`."""
    pairs = [line.partition("=") for line in text.splitlines() if line]
    return {name: value for name, _, value in pairs}


def mean_results(records: Sequence[TrialRecord]) -> dict[str, float]:
    losses = [record.loss if record.loss is not None else math.inf for record in records]
    results = {OBJECTIVE: sum(record.top1 or 0.0 for record in records) / len(records)}
    mean_loss = sum(losses) / len(losses)
    return {**results, LOSS: mean_loss} if math.isfinite(mean_loss) else results


def _print_trial(trial: Trial, record: TrialRecord | None, error: str) -> None:
    if record is not None:
        error = record.ended if record.top1 is None else f"top-1 {record.top1:.2%}"
    print(f"{trial.name}: {error}", flush=True)


def main() -> int:
    try:
        with preempt_on_sigterm():
            results = run_experiment_trial()
    except PodscaleError as error:
        print(f"podscale trial: {error}", file=sys.stderr, flush=True)
        return int(error.exit_code)
    for name, value in results.items():
        print(f"{name}={value:.6f}", flush=True)
    return int(ExitCode.DONE)


if __name__ == "__main__":
    sys.exit(main())
