"""Run one stage on a cluster, from its document to its end: `podscale submit --wait` and the pipeline's launcher."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TextIO

from podscale.config import RunConfig
from podscale.errors import ExitCode, InputError
from podscale.kubernetes import retry
from podscale.kubernetes.client import ClusterClient, connect_cluster, delete_object
from podscale.kubernetes.errors import ApiError, ApiUnreachable
from podscale.kubernetes.job_spec import START_ANNOTATION, JobSpec, JobStage, build_job_spec, is_pipeline_job
from podscale.kubernetes.job_state import JobState
from podscale.kubernetes.job_watcher import OnStarted, WaitLimits, wait_for_job
from podscale.kubernetes.namespace import check_stages
from podscale.kubernetes.pipeline_run import find_pipeline_run
from podscale.kubernetes.render import JobManifests, choose_backend, render_job, suitable_backends
from podscale.kubernetes.resources import JOB_KINDS, KIND_PROVIDERS, PODS, KubernetesObject, name_of, title_of
from podscale.kubernetes.retry import RetryPolicy
from podscale.kubernetes.submit import Submission, stop_command, submit_job
from podscale.runs import RunDirectory
from podscale.runs.job_start import JobStart, write_job_start
from podscale.runs.stage_outcomes import StageName
from podscale.util.processes import SigtermReceived


def choose_job_kind(api: ClusterClient, spec: JobSpec, backend: str) -> str:
    """Return the backend; for `auto` and `local` the best one that the cluster serves. Raises InputError if none."""
    if backend not in ("auto", "local"):
        return backend
    kinds = suitable_backends(spec)
    for name in kinds:
        if api.serves(JOB_KINDS[name]):
            return name
    provider = KIND_PROVIDERS[JOB_KINDS[kinds[0]].group]
    raise InputError(
        f"{spec.name} needs one of {', '.join(JOB_KINDS[name].kind for name in kinds)}, and this cluster has none",
        field="launch.backend",
        got=backend,
        hint=f"Install {provider.name} {provider.version} or newer: {provider.install}",
    )


@dataclass(frozen=True)
class JobResult:
    """Result of a stage on the cluster: exit code of the stage, and its error."""

    stage: JobStage
    exit_code: int
    error: str = ""
    reused: bool = False
    """The job had succeeded before."""

    @property
    def is_done(self) -> bool:
        return self.exit_code == ExitCode.DONE


def run_stage(
    config: RunConfig,
    stage: StageName,
    shard_set: str | None = None,
    *,
    out: TextIO | None = None,
    stop_on_signal: bool = False,
    pipeline: bool = False,
    limits: WaitLimits | None = None,
) -> JobResult:
    """Submit or adopt the job of a stage and wait until it ends; write the log of rank 0 to `out`.

    Args:
        stop_on_signal: SIGTERM and Ctrl-C delete the job; otherwise it continues, and the same call adopts it again.
        pipeline: the caller is a pipeline task. Its job stops by itself if the launcher's heartbeat stops, and belongs
            to the Workflow of the pipeline. An outage of the API server may last as long as the stage.

    Raises:
        InputError: the cluster, or the policy of the namespace, refuses the job.
        ApiUnreachable: the API server did not answer for too long.
        JobVanished: the job was deleted.
    """
    printer = LinePrinter(out or sys.stdout)
    policy = RetryPolicy(config.launch.time_limit_hours * 3600) if pipeline else retry.UNATTENDED
    api = connect_cluster(config.launch.cluster, policy=policy, notify=printer.notify)
    manifests = build_manifests(api, config, stage, shard_set, pipeline=pipeline)
    pipeline_run = find_pipeline_run(api) if pipeline else None
    if pipeline_run is not None and pipeline_run.owner is not None:
        manifests.job["metadata"]["ownerReferences"] = [pipeline_run.owner]
    submission = submit_manifests(api, manifests, printer, lambda: check_stages(api, config, (stage,), shard_set))
    on_started = _job_start_writer(api, config, stage, pipeline=pipeline)
    return follow_job(
        api, submission, stage, printer, stop_on_signal=stop_on_signal, limits=limits, on_started=on_started
    )


def follow_job(
    api: ClusterClient,
    submission: Submission,
    stage: JobStage,
    printer: "LinePrinter",
    *,
    stop_on_signal: bool = False,
    limits: WaitLimits | None = None,
    on_started: OnStarted = lambda start, leader: None,
) -> JobResult:
    """Wait until a submitted job ends, print its log, and return its result; the arguments are those of run_stage."""
    job = submission.job
    if submission.action == "finished":
        return JobResult(stage, int(ExitCode.DONE), reused=True)
    with _handle_signal(api, job, printer, stop=stop_on_signal):
        state = wait_for_job(
            api, job, print_line=printer.line, notify=printer.notify, limits=limits, on_started=on_started
        )
    return job_result(stage, state)


def submit_stage(
    api: ClusterClient, config: RunConfig, stage: StageName, shard_set: str | None, printer: "LinePrinter"
) -> Submission:
    """Render and submit the job of a stage, and report the result."""
    manifests = build_manifests(api, config, stage, shard_set)
    return submit_manifests(api, manifests, printer, lambda: check_stages(api, config, (stage,), shard_set))


def submit_manifests(
    api: ClusterClient, manifests: JobManifests, printer: "LinePrinter", check: Callable[[], object]
) -> Submission:
    """Submit a job, and report the result."""
    submission = submit_job(api, manifests, printer.notify, check)
    results = {
        "created": "submitted",
        "adopted": "already exists and continues as it was submitted",
        "finished": "succeeded before, nothing to do; if its results are gone, run "
        f"`{stop_command(submission.job)} --delete`, then submit again",
    }
    printer.notify(f"{title_of(submission.job)} in namespace {api.namespace}: {results[submission.action]}")
    if submission.action == "adopted" and is_pipeline_job(submission.job) and not is_pipeline_job(manifests.job):
        printer.notify(
            "a pipeline launched it, and it stops by itself if the pipeline's launcher is gone "
            "(launch.cluster.launcher_grace_minutes); then submit again to resume"
        )
    return submission


def build_manifests(
    api: ClusterClient, config: RunConfig, stage: StageName, shard_set: str | None = None, *, pipeline: bool = False
) -> JobManifests:
    spec = build_job_spec(config, stage, shard_set, pipeline=pipeline)
    backend = choose_backend(spec, "auto")
    return render_job(spec, choose_job_kind(api, spec, config.launch.backend) if backend == "auto" else backend)


class LinePrinter:
    """Thread-safe printer of lines to one stream; notices have a prefix."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._lock = threading.Lock()

    def line(self, text: str) -> None:
        with self._lock:
            self._out.write(text + "\n")
            self._out.flush()

    def notify(self, text: str) -> None:
        self.line(f"[cluster] {text}")


@contextmanager
def _handle_signal(api: ClusterClient, job: KubernetesObject, printer: LinePrinter, *, stop: bool) -> Iterator[None]:
    """Delete the job, or leave it, when this process receives SIGTERM or Ctrl-C."""
    try:
        yield
    except (SigtermReceived, KeyboardInterrupt):
        if stop:
            delete_object(api.with_retry(retry.INTERACTIVE, printer.notify), job)
            printer.notify(f"{title_of(job)} is deleted: its pods save and exit; submit again to resume")
        else:
            printer.notify(f"{title_of(job)} continues; the same command adopts it, `{stop_command(job)}` stops it")
        raise


def _job_start_writer(api: ClusterClient, config: RunConfig, stage: StageName, *, pipeline: bool) -> OnStarted:
    """Return the function that leaves the start of a job's pods for rank 0.

    A pipeline's launcher writes it into the run directory; others annotate the leading pod of a training, if they may.
    """

    def leave(start: JobStart, leader: KubernetesObject) -> None:
        if pipeline:
            write_job_start(RunDirectory.for_config(config), start)
        elif stage == "train":
            with suppress(ApiError, ApiUnreachable):  # without it, only the metrics of the start are incomplete
                change = {"metadata": {"annotations": {START_ANNOTATION: start.to_text()}}}
                api.with_retry(retry.INTERACTIVE, lambda line: None).patch(PODS, name_of(leader), change)

    return leave


def job_result(stage: JobStage, state: JobState) -> JobResult:
    """Return the result of a stage from the last state of its job."""
    if state.phase == "succeeded":
        return JobResult(stage, int(ExitCode.DONE))
    if state.is_permanent or state.stage_exit is None:
        return JobResult(stage, int(ExitCode.BAD_INPUT if state.is_permanent else ExitCode.FAILED), state.reason)
    code = state.stage_exit.exit_code if state.stage_exit.exit_code in set(ExitCode) else int(ExitCode.FAILED)
    return JobResult(stage, code, state.stage_exit.error or state.reason)
