"""Launcher of a pipeline task: runs one stage as a job of the cluster and submits the job again if it fails.

The launcher renews its heartbeat in the run directory while it waits. A launcher that starts again adopts the running
job, unless that job is abandoned: then it deletes the job first, because its pods do no more work.

It records its attempts in `launcher.json` of the run directory. The record shares launch.retries between the launcher,
which submits a failed job again, and Kubeflow Pipelines, which starts a failed launcher again: both count the failures
of one run of the pipeline. It also shows the exit handler whether the launcher ended by itself or was killed.
"""

import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Literal

from podscale.config import RunConfig
from podscale.errors import ExitCode, PodscaleError, error_from_exit_code
from podscale.kubernetes.client import ClusterClient, connect_cluster, wait_until_gone
from podscale.kubernetes.job_spec import job_identity
from podscale.kubernetes.job_watcher import JobVanished, NamespaceGone
from podscale.kubernetes.jobs import stop_jobs
from podscale.kubernetes.pipeline_run import find_pipeline_run
from podscale.kubernetes.retry import UNATTENDED
from podscale.kubernetes.run_stage import JobResult, run_stage
from podscale.runs import RunDirectory, stage_outcomes
from podscale.runs.launcher_heartbeat import LauncherHeartbeat, forget_silence, is_abandoned
from podscale.runs.stage_outcomes import StageName, read_entries
from podscale.util.files import write_json

RETRY_PAUSE_SECONDS = 5.0
"""Time between the failure of a job and its next submission, seconds."""

LauncherState = Literal["running", "done", "failed"]


@dataclass(frozen=True)
class LauncherRecord:
    """Attempts at one stage in one run of the pipeline.

    Args:
        pipeline: Run of the pipeline, as `podscale.kubernetes.pipeline_run` identifies it; "" if unknown.
        state: `running` until the launcher ends by itself; a killed launcher leaves it so.
        job_failures: Jobs that failed or vanished.
        error: Error of the newest failure.
    """

    pipeline: str
    state: LauncherState = "running"
    job_failures: int = 0
    exit_code: int = 0
    error: str = ""

    def with_failure(self, exit_code: int, error: str) -> "LauncherRecord":
        return replace(self, job_failures=self.job_failures + 1, exit_code=exit_code, error=error)


def read_launcher_record(run: RunDirectory, stage: str) -> LauncherRecord | None:
    """Return the newest launcher's record of a stage; None if no launcher has run it."""
    with suppress(KeyError, TypeError):
        return LauncherRecord(**read_entries(run.launcher)[stage])
    return None


def write_launcher_record(run: RunDirectory, stage: str, record: LauncherRecord) -> None:
    """Write the record. A volume that cannot be written makes the count of retries less exact, no more."""
    with suppress(OSError):
        run.path.mkdir(parents=True, exist_ok=True)
        write_json(run.launcher, {**read_entries(run.launcher), stage: asdict(record)})


def begin_attempt(run: RunDirectory, stage: str, pipeline: str) -> LauncherRecord:
    """Record that a launcher works on the stage; earlier failures count if the same run of the pipeline had them."""
    earlier = read_launcher_record(run, stage)
    same_pipeline = earlier is not None and pipeline != "" and earlier.pipeline == pipeline
    record = replace(earlier, state="running") if earlier is not None and same_pipeline else LauncherRecord(pipeline)
    write_launcher_record(run, stage, record)
    return record


def launch_stage(config: RunConfig, stage: StageName, shard_set: str) -> JobResult:
    """Run the job of a stage to its end; submit it again up to launch.retries times. Its log goes to stdout.

    Kubeflow Pipelines may retry the launcher too. Failures of earlier attempts in the same run of the pipeline count.

    Raises:
        PodscaleError: There is no job, and no retry is left or none would help.
    """
    run = RunDirectory.for_config(config)
    with LauncherHeartbeat(run, config.launch.cluster.launcher_grace_minutes * 60):
        api = connect_cluster(config.launch.cluster, policy=UNATTENDED)
        pipeline = find_pipeline_run(api)
        record = begin_attempt(run, stage, pipeline.identity if pipeline is not None else "")
        try:
            if record.job_failures > config.launch.retries:
                raise _no_retry_left(record)
            if is_abandoned(run, stage):
                _notify("the job was abandoned by its pipeline and has stopped: it is replaced")
                _delete_job(api, config, stage, shard_set)
            forget_silence(run)
            result = _run_with_retries(api, config, stage, shard_set, record)
        except Exception:
            _record_end(run, stage, "failed")
            raise
        _record_end(run, stage, "done" if result.is_done else "failed")
        return result


def _run_with_retries(
    api: ClusterClient, config: RunConfig, stage: StageName, shard_set: str, record: LauncherRecord
) -> JobResult:
    """Run the job until it is done, its input is bad, or no retry is left."""
    run = RunDirectory.for_config(config)
    while True:
        vanished: JobVanished | None = None
        try:
            result = _run_once(api, config, stage, shard_set)
            if result.exit_code in (ExitCode.DONE, ExitCode.BAD_INPUT):
                return result
        except NamespaceGone:
            raise
        except JobVanished as error:
            vanished, result = error, JobResult(stage, int(error.exit_code), str(error))
        record = record.with_failure(result.exit_code, result.error)
        write_launcher_record(run, stage, record)
        left = config.launch.retries - record.job_failures
        if left < 0:
            if vanished is not None:
                raise vanished
            return result
        _notify(f"{result.error}; the job is submitted again ({left} left of launch.retries={config.launch.retries})")
        time.sleep(RETRY_PAUSE_SECONDS)
        if is_abandoned(run, stage):
            _delete_job(api, config, stage, shard_set)
        forget_silence(run)


def _run_once(api: ClusterClient, config: RunConfig, stage: StageName, shard_set: str) -> JobResult:
    """Return the result of the job; a job that succeeded but whose result is gone is replaced first."""
    result = run_stage(config, stage, shard_set, out=sys.stdout, pipeline=True)
    if not result.reused or stage_outcomes.finished_outcome(config, stage, shard_set) is not None:
        return result
    _notify("the job succeeded before, but its result is gone: it is submitted again")
    _delete_job(api, config, stage, shard_set)
    return run_stage(config, stage, shard_set, out=sys.stdout, pipeline=True)


def _delete_job(api: ClusterClient, config: RunConfig, stage: StageName, shard_set: str) -> None:
    """Delete the job of this stage, also a finished one, and wait until it is gone."""
    identity = job_identity(config, stage, shard_set)
    for job in stop_jobs(api, config.run.id, stage, identity=identity, include_finished=True).stopped:
        wait_until_gone(api, job)


def _no_retry_left(record: LauncherRecord) -> PodscaleError:
    """Return the error of a launcher that KFP started again although its job has used all retries."""
    return error_from_exit_code(record.exit_code or int(ExitCode.FAILED), record.error)


def _record_end(run: RunDirectory, stage: StageName, state: LauncherState) -> None:
    record = read_launcher_record(run, stage)
    if record is not None:
        write_launcher_record(run, stage, replace(record, state=state))


def _notify(text: str) -> None:
    print(f"[cluster] {text}", flush=True)
