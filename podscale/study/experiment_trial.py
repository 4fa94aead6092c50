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
from podscale.study.document import StudyDocument
from podscale.study.grid import TrialGrid
from podscale.study.records import TrialRecord
from podscale.study.runner import run_in_pod
from podscale.study.search_space import narrow_study
from podscale.study.sweep_series import known_records
from podscale.util import env
from podscale.util.processes import preempt_on_sigterm

OBJECTIVE, LOSS = "top1", "loss"
"""Names of the printed results: top-1 of the last evaluation as a fraction, and its loss."""


def run_experiment_trial(environ: Mapping[str, str] = os.environ) -> dict[str, float]:
    """Train with the chosen parameters; return the mean results over the seeds.

    A training that diverged counts with a top-1 of 0, and leaves the loss out.

    Raises:
        PodscaleError: A training failed.
    """
    study = StudyDocument.model_validate_json(environ[env.STUDY])
    chosen = TrialGrid(narrow_study(study, parse_choice(environ[env.TRIAL])))
    records = run_in_pod(TrialGrid(study), chosen.series, field="trial")
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
