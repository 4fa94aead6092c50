"""Trials of a study in one pod: a task of the study's pipeline, or the trial of an optimizer such as Katib."""

from collections.abc import Sequence

from podscale.errors import PodscaleError
from podscale.runs.lease import Lease
from podscale.study.grid import TrialGrid
from podscale.study.records import RecordStore, TrialRecord
from podscale.study.runner import StudyRunner
from podscale.study.sweep_series import SweepSeries, Trial
from podscale.util.formatting import format_count

SHARDS_LEASE = "shards.lease"
SHARDS_WAIT_SECONDS = 24 * 3600.0
"""Timeout for another pod to build the shard set, seconds."""


def run_in_pod(grid: TrialGrid, series: Sequence[SweepSeries], *, field: str) -> RecordStore:
    """Run the missing trials of some series, one at a time, and print each result; return the records of the workspace.

    Pods of one study start at the same time: one of them builds a missing shard set while the others wait.

    Args:
        field: Field of the error.

    Raises:
        PodscaleError: A trial failed.
    """
    records = RecordStore(grid.workspace)
    runner = StudyRunner(grid, records, jobs=1, series=series, on_trial_end=print_trial)
    runner.study_directory.mkdir(parents=True, exist_ok=True)
    lease = Lease.hold(runner.study_directory / SHARDS_LEASE, wait_seconds=SHARDS_WAIT_SECONDS)
    try:
        runner.prepare()
    finally:
        lease.release()
    runner.run()
    if runner.failures:
        listing = "\n".join(f"{name}: {error}" for name, error in runner.failures.items())
        raise PodscaleError(f"{format_count(len(runner.failures), 'trial')} failed:\n{listing}", field=field)
    return records


def print_trial(trial: Trial, record: TrialRecord | None, error: str) -> None:
    """Print the end of a trial: its top-1, or how it ended."""
    if record is not None:
        error = record.ended if record.top1 is None else f"top-1 {record.top1:.2%}"
    print(f"{trial.name}: {error}", flush=True)
