"""Training that a job of the cluster carries out: what a launcher pod does, and what the exit handler does about it.

The job's own pods write the run directory. The launcher, which has the same volume mounted, waits for them, and writes
there only what they could not: why a job never came to training.
"""

import sys
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime

from podscale.config import RunConfig
from podscale.errors import ExitCode, InputError, PodscaleError, error_from_exit_code
from podscale.kubernetes.client import connect_cluster, wait_until_gone
from podscale.kubernetes.job_spec import job_identity
from podscale.kubernetes.jobs import job_title, stop_jobs
from podscale.kubernetes.pod_state import name_of
from podscale.kubernetes.retry import UNATTENDED
from podscale.kubernetes.run_stage import JobResult, run_stage
from podscale.runs import (
    RunDirectory,
    StageOutcome,
    check_not_taken,
    dataset_directory,
    read_outcomes,
    stage_outcomes,
    write_outcome,
)
from podscale.runs.lease import pod_exit_seconds


def train_on_cluster(config: RunConfig, shard_set: str) -> StageOutcome:
    """Submits the training job, or adopts it where it is at work, waits for its end and returns what it recorded.

    Its first pod's log goes to standard output. Raises what the ranks raised, or why there is no job. A request to
    stop ends the waiting, not the job: the next attempt adopts it.
    """
    stage_outcomes.check_run_document(config)
    found = stage_outcomes.finished_outcome(config, "train", shard_set)
    if found is not None:
        return replace(found, reused=True)
    begun = datetime.now(UTC)
    try:
        ended = _run_training_job(config, shard_set)
    except PodscaleError as error:
        _record_outcome(
            config, StageOutcome("train", int(error.exit_code), str(error), *_outcome_times(begun)), patience=0.0
        )
        raise
    if ended.exit_code == ExitCode.DONE:
        return _read_outcome(config, shard_set)
    why = ended.error or f"the training job ended with exit code {ended.exit_code}"
    outcome = StageOutcome("train", ended.exit_code, why, *_outcome_times(begun))
    _record_outcome(config, outcome, patience=pod_exit_seconds(config.launch.grace_seconds))
    raise error_from_exit_code(ended.exit_code, why)


def _run_training_job(config: RunConfig, shard_set: str) -> JobResult:
    """How the job ended; one that succeeded before, and whose products are gone since, is replaced first."""
    ended = run_stage(config, "train", shard_set, out=sys.stdout, pipeline=True)
    if not ended.reused or stage_outcomes.finished_outcome(config, "train", shard_set) is not None:
        return ended
    print("[cluster] the job succeeded before, but what it made is gone: it is submitted anew", flush=True)
    api = connect_cluster(config.launch.cluster, policy=UNATTENDED)
    mark = job_identity(config, "train", shard_set)
    for resource, job in stop_jobs(api, config.run.id, "train", identity=mark, include_finished=True).stopped:
        wait_until_gone(api, resource, name_of(job), str(job["metadata"]["uid"]))
    return run_stage(config, "train", shard_set, out=sys.stdout, pipeline=True)


def stop_training_job(config: RunConfig) -> str:
    """Stops the training job of this document where it is still at work; returns one sentence of what became of it.

    Jobs that have ended are left, for their logs, and so is one of another document under the same run id. Raises
    PodscaleError where it cannot be stopped, with how to do it by hand.
    """
    try:
        api = connect_cluster(config.launch.cluster, policy=UNATTENDED)
        shard_set = dataset_directory(config.run.workspace, config.data)  # as the run's own shard stage names it
        found = stop_jobs(api, config.run.id, "train", identity=job_identity(config, "train", shard_set))
    except PodscaleError as error:
        raise PodscaleError(
            f"the training job may still be at work, because it could not be stopped: {error}",
            field=error.field,
            hint=f"Stop it with `podscale stop {config.run.id}`",
        ) from error
    if found.stopped:
        return f"{' and '.join(map(job_title, found.stopped))} was stopped: its pods save and end."
    if found.others:
        return f"{' and '.join(map(job_title, found.others))} runs on: it is another document's under the same run id."
    return "No training job was at work."


def _read_outcome(config: RunConfig, shard_set: str) -> StageOutcome:
    """The outcome of a job that is done; raises InputError where this pod does not see what it left."""
    found = stage_outcomes.finished_outcome(config, "train", shard_set)
    if found is None:
        raise InputError(
            "the training job is done, but its model is not here",
            field=str(RunDirectory.for_config(config).model),
            hint="Every pod of a run must mount the same volume at run.workspace: name its claim in "
            "launch.cluster.workspace_claim",
        )
    return found


def _record_outcome(config: RunConfig, outcome: StageOutcome, *, patience: float) -> None:
    """Leaves how the training ended where the exit handler and the report find it, unless the job did that itself.

    The pods of a job that has failed may be at work for a moment still: one that was started again, and is now
    stopped, has dropped the record of the failure. patience: seconds that they get to let go of the run directory;
    where somebody else holds it longer, nothing is written.
    """
    run = RunDirectory.for_config(config)
    with suppress(OSError, InputError):
        check_not_taken(run.create().lease, patience)
        told = read_outcomes(run.outcome).get("train")
        if told is None or told.exit_code != outcome.exit_code:
            write_outcome(run.outcome, outcome)


def _outcome_times(begun: datetime) -> tuple[float, str]:
    now = datetime.now(UTC)
    return (now - begun).total_seconds(), now.isoformat()
