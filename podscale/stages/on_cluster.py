"""Stages of a pipeline as jobs of the cluster: policy check of the first task, launcher pod, stop by the exit handler.

The job's own pods write the run directory. The launcher mounts the same volume, waits for them, and writes only its
heartbeat, its attempts, and what the pods could not: the reason if a job never started training.
"""

from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime

from podscale.config import RunConfig
from podscale.errors import ExitCode, InputError, PodscaleError, error_from_exit_code
from podscale.kubernetes.client import connect_cluster
from podscale.kubernetes.errors import ApiError, ApiUnreachable
from podscale.kubernetes.job_spec import job_identity, launched_stages
from podscale.kubernetes.jobs import active_jobs, stop_jobs
from podscale.kubernetes.namespace import check_pipeline
from podscale.kubernetes.resources import title_of
from podscale.kubernetes.retry import UNATTENDED
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
from podscale.runs.stage_outcomes import StageName
from podscale.stages.pipeline_launcher import launch_stage, read_launcher_record, write_launcher_record

JOB_TITLES = {"train": "training job", "evaluate": "evaluation job"}


def check_namespace_policy(config: RunConfig) -> None:
    """Raise InputError if the policy of this pod's namespace refuses the pipeline of a document.

    The parameter `image` of a run can name another image than the package that was checked when it was compiled. If
    the API server does not answer this pod, or refuses it, the check is left to the launchers and to admission.
    """
    try:
        api = connect_cluster(config.launch.cluster)
    except InputError as error:  # no token of a service account
        _print_unchecked(error)
        return
    try:
        check_pipeline(api, config)
    except (ApiError, ApiUnreachable) as error:
        _print_unchecked(error)


def run_on_cluster(config: RunConfig, stage: StageName, shard_set: str) -> StageOutcome:
    """Submit the job of a stage, or adopt a running one, wait until it ends, and return its recorded outcome.

    A stop request ends the wait, not the job: the next attempt adopts the job.

    Raises:
        PodscaleError: The error of the ranks, or why there is no job.
    """
    stage_outcomes.check_run_document(config)
    finished = stage_outcomes.finished_outcome(config, stage, shard_set)
    if finished is not None:
        return replace(finished, reused=True)
    begun = datetime.now(UTC)
    try:
        result = launch_stage(config, stage, shard_set)
    except PodscaleError as error:
        _record_failure(config, stage, int(error.exit_code), str(error), begun, wait_seconds=0.0)
        raise
    if result.exit_code == ExitCode.DONE:
        return _read_outcome(config, stage, shard_set)
    reason = result.error or f"the {JOB_TITLES[stage]} ended with exit code {result.exit_code}"
    wait_seconds = pod_exit_seconds(config.launch.grace_seconds)
    _record_failure(config, stage, result.exit_code, reason, begun, wait_seconds)
    raise error_from_exit_code(result.exit_code, reason)


def end_jobs(config: RunConfig, state: str) -> str:
    """Stop the jobs of a run that did not succeed, unless a retry of the run can adopt them.

    Args:
        state: State of the pipeline, as KFP gives it to the exit handler: RUNNING if the run was terminated. FAILED
            without a failure that the launcher recorded means that the launcher was killed; its job is healthy.

    Returns:
        One paragraph for each stage, for the summary.
    """
    return "\n\n".join(_end_job(config, stage, state) for stage in launched_stages(config))


def _print_unchecked(error: PodscaleError) -> None:
    print(f"the policy of the namespace was not checked: {error}", flush=True)


def _end_job(config: RunConfig, stage: StageName, state: str) -> str:
    run = RunDirectory.for_config(config)
    record = read_launcher_record(run, stage)
    try:
        if state == "FAILED" and record is not None and record.state == "running":
            return _describe_remaining_job(config, stage)
        return _stop_job(config, stage)
    finally:
        if record is not None:  # a retry of the run by its user has all retries again
            write_launcher_record(run, stage, replace(record, job_failures=0))


def _describe_remaining_job(config: RunConfig, stage: StageName) -> str:
    """Return what becomes of the job whose launcher was killed."""
    api = connect_cluster(config.launch.cluster, policy=UNATTENDED)
    jobs = active_jobs(api, config.run.id, stage)
    if not jobs:
        return f"The launcher was killed before it could record an error. No {JOB_TITLES[stage]} was running."
    minutes = config.launch.cluster.launcher_grace_minutes
    end = (
        f"Without a launcher it saves and stops by itself {minutes:g} minutes after the last heartbeat"
        if minutes
        else "It does not stop by itself (launch.cluster.launcher_grace_minutes is 0)"
    )
    titles = " and ".join(map(title_of, jobs))
    return (
        f"The launcher was killed before it could record an error; {titles} runs on. A retry of this run attaches to "
        f"it. {end}; `podscale stop {config.run.id}` stops it now."
    )


def _stop_job(config: RunConfig, stage: StageName) -> str:
    """Stop the job of a stage of this document if it still runs; return one sentence with the result.

    Finished jobs stay for their logs. If the job cannot be stopped, the PodscaleError names the command to stop it.
    """
    try:
        api = connect_cluster(config.launch.cluster, policy=UNATTENDED)
        shard_set = dataset_directory(config.run.workspace, config.data)  # as the run's own shard stage names it
        jobs = stop_jobs(api, config.run.id, stage, identity=job_identity(config, stage, shard_set))
    except PodscaleError as error:
        raise PodscaleError(
            f"the {JOB_TITLES[stage]} may still run, because it could not be stopped: {error}",
            field=error.field,
            hint=f"Stop it with `podscale stop {config.run.id}`",
        ) from error
    if jobs.stopped:
        return f"{' and '.join(map(title_of, jobs.stopped))} was stopped: its pods save and exit."
    if jobs.others:
        others = " and ".join(map(title_of, jobs.others))
        return f"{others} keeps running: it belongs to another document with the same run id."
    return f"No {JOB_TITLES[stage]} was running."


def _read_outcome(config: RunConfig, stage: StageName, shard_set: str) -> StageOutcome:
    """Return the outcome of a finished job. Raises InputError if this pod does not see its result."""
    outcome = stage_outcomes.finished_outcome(config, stage, shard_set)
    if outcome is None:
        raise InputError(
            f"the {JOB_TITLES[stage]} is done, but its result is not here",
            field=str(RunDirectory.for_config(config).path),
            hint="Every pod of a run must mount the same volume at run.workspace: name its claim in "
            "launch.cluster.workspace_claim",
        )
    return outcome


def _record_failure(
    config: RunConfig, stage: StageName, exit_code: int, reason: str, begun: datetime, wait_seconds: float
) -> None:
    """Write the outcome of the stage for the exit handler and the report, unless the job did.

    Pods of a failed job may still run, so it waits up to `wait_seconds` for the lease, and writes nothing if the lease
    stays held. A restarted pod may have removed the job's own record.
    """
    run, now = RunDirectory.for_config(config), datetime.now(UTC)
    with suppress(OSError, InputError):
        check_not_taken(run.create().lease, wait_seconds)
        recorded = read_outcomes(run.outcome).get(stage)
        if recorded is None or recorded.exit_code != exit_code:
            seconds = (now - begun).total_seconds()
            write_outcome(run.outcome, StageOutcome(stage, exit_code, reason, seconds, now.isoformat()))
