"""Run one stage on a cluster, from its document to its end: `podscale submit --wait` and the pipeline's launcher.

Also chooses the kind of job: from the document, else from what the cluster serves and the hardware needs.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

from podscale.config import RunConfig
from podscale.errors import ExitCode, InputError
from podscale.kubernetes import retry
from podscale.kubernetes.client import ClusterClient, connect_cluster, delete_job
from podscale.kubernetes.job_spec import JobSpec, StageName, build_job_spec
from podscale.kubernetes.job_state import JobState
from podscale.kubernetes.job_watcher import WaitLimits, wait_for_job
from podscale.kubernetes.pod_state import name_of
from podscale.kubernetes.render import JobManifests, choose_backend, render_job, suitable_backends
from podscale.kubernetes.resources import JOB_KINDS, KIND_PROVIDERS
from podscale.kubernetes.submit import LAUNCHER_ANNOTATION, PIPELINE_LAUNCHER, Submission, stop_command, submit_job
from podscale.util.processes import SigtermReceived


def choose_job_kind(api: ClusterClient, spec: JobSpec, backend: str) -> str:
    """Return the name of the backend; `auto` and `local` look at the cluster.

    Raises:
        InputError: The cluster serves no kind of job that can run the training.
    """
    if backend not in ("auto", "local"):
        return backend
    kinds = suitable_backends(spec)
    found = next((name for name in kinds if api.serves(JOB_KINDS[name])), None)
    if found is not None:
        return found
    provider = KIND_PROVIDERS[JOB_KINDS[kinds[0]].group]
    raise InputError(
        f"this cluster has none of {', '.join(JOB_KINDS[name].kind for name in kinds)}, of which {spec.name} needs one",
        field="launch.backend",
        got=backend,
        hint=f"Install {provider.name} {provider.version} or newer: {provider.install}",
    )


@dataclass(frozen=True)
class JobResult:
    """Result of a stage on the cluster: exit code of the stage, and its error."""

    stage: StageName
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
    """Submit or adopt the job of a stage and wait until it ends; the log of rank 0 goes to `out`.

    Args:
        stop_on_signal: SIGTERM and Ctrl-C delete the job; otherwise it goes on, and the same call adopts it again.
        pipeline: The caller is a pipeline task, which is retried if its job vanishes; messages about stopping say so.

    Raises:
        InputError: The cluster refuses the job.
        ApiUnreachable: The API server was out of reach for too long.
        JobVanished: The job was deleted.
    """
    printer = LinePrinter(out or sys.stdout)
    api = connect_cluster(config.launch.cluster, policy=retry.UNATTENDED, notify=printer.notify)
    manifests = build_manifests(api, config, stage, shard_set)
    if pipeline:
        manifests.job["metadata"]["annotations"][LAUNCHER_ANNOTATION] = PIPELINE_LAUNCHER
    found = _submit_manifests(api, manifests, printer)
    if found.action == "finished":
        return JobResult(stage, int(ExitCode.DONE), reused=True)
    with _handle_signal(api, found, printer, stop=stop_on_signal):
        state = wait_for_job(
            api, found.resource, found.job, print_line=printer.line, notify=printer.notify, limits=limits
        )
    return _job_result(stage, state)


def submit_stage(
    api: ClusterClient, config: RunConfig, stage: StageName, shard_set: str | None, printer: "LinePrinter"
) -> Submission:
    """Render and submit the job of a stage, and report the result."""
    return _submit_manifests(api, build_manifests(api, config, stage, shard_set), printer)


def _submit_manifests(api: ClusterClient, manifests: JobManifests, printer: "LinePrinter") -> Submission:
    found = submit_job(api, manifests, printer.notify)
    what = f"{found.resource.kind} {name_of(found.job)} in namespace {api.namespace}"
    printer.notify(
        {
            "created": f"{what}: submitted",
            "adopted": f"{what}: is there already and runs on as it was submitted",
            "finished": f"{what}: succeeded before, nothing to do; what it made is not looked at: if that is gone, "
            f"`{stop_command(found.job)} --delete`, then submit again",
        }[found.action]
    )
    return found


def build_manifests(
    api: ClusterClient, config: RunConfig, stage: StageName, shard_set: str | None = None
) -> JobManifests:
    """Return the objects of a stage for this cluster; looks up the kind of job only if it matters."""
    spec = build_job_spec(config, stage, shard_set)
    backend = choose_backend(spec, "auto")
    return render_job(spec, choose_job_kind(api, spec, config.launch.backend) if backend == "auto" else backend)


class LinePrinter:
    """Printer of whole lines from several threads to one stream; our own lines carry a prefix."""

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
def _handle_signal(api: ClusterClient, found: Submission, printer: LinePrinter, *, stop: bool) -> Iterator[None]:
    """What becomes of the job when the one who waits is told to stop."""
    name = name_of(found.job)
    try:
        yield
    except (SigtermReceived, KeyboardInterrupt):
        if stop:
            delete_job(
                api.with_retry(retry.INTERACTIVE, printer.notify),
                found.resource,
                name,
                str(found.job["metadata"]["uid"]),
            )
            printer.notify(f"{found.resource.kind} {name} is deleted: its pods save and end; submit again to go on")
        else:
            printer.notify(
                f"{found.resource.kind} {name} runs on; the same command takes it up again, "
                f"`{stop_command(found.job)}` ends it"
            )
        raise


def _job_result(stage: StageName, state: JobState) -> JobResult:
    if state.phase == "succeeded":
        return JobResult(stage, int(ExitCode.DONE))
    if state.is_permanent or state.stage_exit is None:
        return JobResult(stage, int(ExitCode.BAD_INPUT if state.is_permanent else ExitCode.FAILED), state.reason)
    known = {int(code) for code in ExitCode}
    code = state.stage_exit.exit_code if state.stage_exit.exit_code in known else int(ExitCode.FAILED)
    return JobResult(stage, code, state.stage_exit.error or state.reason)
