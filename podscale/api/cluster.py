"""Runs on a Kubernetes cluster: `submit`, `attach`, and the handle that both return."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podscale.api.documents import Document, load_with_defaults
from podscale.api.results import RecordKind, Run, select_records
from podscale.config import RunConfig
from podscale.config.document import Overrides
from podscale.errors import InputError
from podscale.pipelines import presets
from podscale.pipelines.presets import CLUSTER_DEFAULTS
from podscale.runs.stage_outcomes import STAGES, StageName
from podscale.telemetry.events import filter_replays
from podscale.util.terminal import LineStream

if TYPE_CHECKING:
    from podscale.api.cluster_jobs import ClusterJobs, PlannedJobs
    from podscale.kubernetes.jobs import JobEntry


@dataclass(frozen=True)
class JobStatus:
    """State of the job of one stage.

    Args:
        phase: phase of the job, such as pending, running, succeeded or failed.
        reason: why the job waits or failed; may be empty.
        running: pods that run, of `expected`.
        exit_code: exit code of the stage; None while it runs.
        error: error of the stage; may be empty.
    """

    stage: str
    kind: str
    name: str
    phase: str
    reason: str
    running: int
    expected: int
    restarts: int
    exit_code: int | None
    error: str


class ClusterRun:
    """Run on a Kubernetes cluster, as `submit` and `attach` return it.

    Args:
        jobs: jobs of the run, one for each stage that was submitted.
    """

    def __init__(self, jobs: "ClusterJobs") -> None:
        self._jobs = jobs
        self.id = jobs.run
        self.namespace = jobs.api.namespace
        self.config = jobs.config

    def __repr__(self) -> str:
        return f"<run {self.id} in namespace {self.namespace}>"

    def wait(self, *, progress: bool | Callable[[str], None] = False, stop_on_signal: bool = False) -> "ClusterRun":
        """Follow the jobs to their end. After `submit`, submit each further stage when the one before it has ended.

        Args:
            progress: print the log of rank 0 and the states of the jobs; or a function that gets each line.
            stop_on_signal: SIGTERM and Ctrl-C delete the job; otherwise it continues, and the same call adopts it.

        Raises:
            PodscaleError: The error of the stage that failed, or of the cluster.
        """
        out = sys.stdout if progress is True else LineStream(progress if callable(progress) else None)
        self._jobs.wait(out, stop_on_signal=stop_on_signal)
        return self

    def status(self, stage: str | None = None) -> list[JobStatus]:
        """Return the state of every job of the run, or of one stage, oldest first; empty if none was submitted."""
        return [_job_status(entry) for entry in self._jobs.entries(stage)]

    def logs(self, stage: str = "train", *, follow: bool = False, pod: str | None = None) -> Iterator[str]:
        """Yield the lines of the log of rank 0, across restarts.

        Args:
            stage: shard, train, evaluate, report, or predict.
            follow: wait for more lines until the job has ended.
            pod: name of the pod to read instead of that of rank 0.

        Raises:
            InputError: There is no job of the stage, or no such pod; raised by the call.
        """
        return self._jobs.log_lines(stage, follow=follow, pod=pod, notify=lambda notice: None)

    def metrics(self, kind: RecordKind | None = None, *, stage: str = "train") -> list[dict[str, Any]]:
        """Return the records of the run's metrics so far, as `Run.metrics`.

        They are read from the run directory if the workspace is mounted here, else from the log of rank 0: then
        lines that the cluster no longer has are missing.
        """
        from podscale.monitoring.watch.sources import JobSource

        if self.config is not None and (records := Run(self.config).metrics()):
            return select_records(records, kind)
        with closing(JobSource(self._jobs.api, self._jobs.entry(stage), follow=False)) as source:
            return select_records(filter_replays(source.records()), kind)

    def stop(self, stage: str | None = None, *, delete: bool = False, wait: bool = True) -> list[str]:
        """Stop the jobs of the run, and return their titles. Their pods save; submitting again resumes.

        Args:
            stage: shard, train, evaluate, report, or predict; None: all.
            delete: also delete jobs that have ended, with their logs.
            wait: return when the pods are gone, or at once.
        """
        from podscale.kubernetes.resources import title_of

        stopped = self._jobs.delete(stage, include_finished=delete)
        for job in stopped if wait else ():
            self._jobs.wait_until_gone(job)
        return [title_of(job) for job in stopped]


def submit(
    document: Document | None = None,
    *,
    stage: str = "all",
    shard_set: str | None = None,
    defaults: str = CLUSTER_DEFAULTS,
    namespace: str | None = None,
    context: str | None = None,
    **overrides: Any,
) -> ClusterRun:
    """Run on a Kubernetes cluster, each stage as a job. The same call again adopts the jobs there.

        run = podscale.submit("recipe.yaml", stage="train")
        run.wait()

    The first stage is submitted; `wait` submits the others in turn.

    Args:
        document: path, name of a preset, values by section, or a loaded document; None: the preset `digits`.
        stage: shard, train, evaluate, report, or all of them in turn.
        shard_set: location of the shards; None: that of the document.
        defaults: file of defaults for options that the document leaves open; `cluster`: those of the chart.
        namespace: short for `launch.cluster.namespace`.
        context: short for `launch.cluster.context`, of the kubeconfig.
        overrides: options by section, or by dotted name.

    Raises:
        InputError: The document, the cluster or the policy of the namespace refuses the job.
    """
    changes = {**overrides, **_cluster_settings(namespace, context)}
    jobs = prepare_submission(load_with_defaults(document, changes, defaults), parse_stages(stage), shard_set)
    jobs.submit_first(LineStream())
    return ClusterRun(jobs)


def prepare_submission(config: RunConfig, stages: Sequence[StageName], shard_set: str | None) -> "PlannedJobs":
    """Check that the cluster takes the jobs of some stages, and return them; nothing is created."""
    from podscale.api.cluster_jobs import PlannedJobs
    from podscale.config.preflight import preflight
    from podscale.kubernetes.client import connect_cluster
    from podscale.kubernetes.namespace import check_stages
    from podscale.kubernetes.submit_checks import check_before_submit

    preflight(config, "job")
    api = connect_cluster(config.launch.cluster)
    check_stages(api, config, stages, shard_set)  # before the first of them runs
    check_before_submit(api, config, stages, shard_set)
    return PlannedJobs(api, config, stages, shard_set)


def attach(run: Document, *, namespace: str | None = None, context: str | None = None) -> ClusterRun:
    """Return the handle of a run that was submitted before. It submits nothing.

    Args:
        run: id of the run, or its document: a path, the name of a preset, or a loaded document.
        namespace: namespace of its jobs; None: that of the document or the kubeconfig.
        context: context of the kubeconfig; None: that of the document, or the current one.
    """
    return ClusterRun(find_jobs(run, namespace, context))


def find_jobs(run: Document, namespace: str | None, context: str | None) -> "ClusterJobs":
    """Return the jobs of a run by its id or document."""
    from podscale.api.cluster_jobs import ClusterJobs
    from podscale.kubernetes.client import connect_cluster
    from podscale.kubernetes.transport import NamedCluster

    if isinstance(run, str) and not Path(run).is_file() and run not in presets.preset_names():
        return ClusterJobs(connect_cluster(NamedCluster(namespace, context)), run)
    config = _load_submitted(run, _cluster_settings(namespace, context))
    return ClusterJobs(connect_cluster(config.launch.cluster), config.run.id, config)


def _load_submitted(run: Document, changes: Overrides) -> RunConfig:
    from podscale.kubernetes.namespace import NoDefaults

    try:
        return load_with_defaults(run, changes, CLUSTER_DEFAULTS)
    except NoDefaults:
        return load_with_defaults(run, changes, None)  # the name of a run needs no workspace


def parse_stages(name: str) -> tuple[StageName, ...]:
    """Return the stages of a name, `all` or one of them; raises InputError for an unknown name."""
    if name == "all":
        return STAGES
    stages = tuple(stage for stage in STAGES if stage == name)
    if not stages:
        raise InputError("unknown stage", field="--stage", got=name, hint=f"Choose one of {', '.join(STAGES)}, all.")
    return stages


def _cluster_settings(namespace: str | None, context: str | None) -> dict[str, str]:
    settings = {"launch.cluster.namespace": namespace, "launch.cluster.context": context}
    return {name: value for name, value in settings.items() if value is not None}


def _job_status(entry: "JobEntry") -> JobStatus:
    from podscale.kubernetes.resources import name_of

    state = entry.state
    code, error = (state.stage_exit.exit_code, state.stage_exit.error) if state.stage_exit else (None, "")
    return JobStatus(
        stage=entry.stage,
        kind=entry.kind,
        name=name_of(entry.job),
        phase=state.phase,
        reason=state.reason,
        running=state.running,
        expected=state.expected,
        restarts=state.restarts,
        exit_code=code,
        error=error,
    )
