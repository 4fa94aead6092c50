"""Jobs of one run on a Kubernetes cluster: what the handle of the API and the commands do with them."""

import queue
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import TextIO, cast

from podscale.config import RunConfig
from podscale.errors import InputError, error_from_exit_code
from podscale.kubernetes import retry
from podscale.kubernetes.client import ClusterClient, wait_until_gone
from podscale.kubernetes.job_spec import JobStage
from podscale.kubernetes.job_watcher import JobObserver
from podscale.kubernetes.jobs import JobEntry, list_jobs, stop_jobs
from podscale.kubernetes.logs import ContainerLog, LogFollower, PodChooser, newest_pod_named
from podscale.kubernetes.pod_state import first_pod
from podscale.kubernetes.resources import KubernetesObject, name_of, title_of
from podscale.kubernetes.run_stage import (
    JobResult,
    LinePrinter,
    build_manifests,
    follow_job,
    job_result,
    run_stage,
    submit_stage,
)
from podscale.kubernetes.submit import Submission, dry_run_job
from podscale.runs.stage_outcomes import StageName
from podscale.util.formatting import printable

STATE_CHECK_SECONDS = 1.0
"""Time between two checks whether a followed job has ended, seconds."""
Notify = Callable[[str], None]


class ClusterJobs:
    """Jobs of a run on the cluster, one for each stage that was submitted.

    Args:
        api: client of the cluster and namespace.
        run: id of the run.
        config: run document; None for a run that is known by its id alone.
    """

    def __init__(self, api: ClusterClient, run: str, config: RunConfig | None = None) -> None:
        self.api, self.run, self.config = api, run, config

    def wait(self, out: TextIO, *, stop_on_signal: bool = False) -> None:
        """Follow the jobs to their end, oldest first. Raises the error of the one that failed."""
        for result in self._results(out, stop_on_signal):
            if not result.is_done:
                message = f"{result.stage} of run {self.run} failed (exit code {result.exit_code}): {result.error}"
                raise error_from_exit_code(result.exit_code, message)

    def _results(self, out: TextIO, stop_on_signal: bool) -> Iterator[JobResult]:
        """Yield the result of each job when it has ended."""
        if not (entries := self.entries()):
            raise InputError(f"no job in namespace {self.api.namespace}", field=f"run {self.run}")
        for entry in entries:
            yield self._wait_for(entry, LinePrinter(out), stop_on_signal)

    def _wait_for(self, entry: JobEntry, printer: LinePrinter, stop_on_signal: bool) -> JobResult:
        stage = cast(JobStage, entry.stage)
        if entry.state.is_finished:
            return job_result(stage, entry.state)
        api = self.api.with_retry(retry.UNATTENDED, printer.notify)
        return follow_job(api, Submission("adopted", entry.job), stage, printer, stop_on_signal=stop_on_signal)

    def entries(self, stage: str | None = None) -> list[JobEntry]:
        """Return the jobs with their pods, oldest first."""
        return list_jobs(self.api, self.run, stage)

    def entry(self, stage: str) -> JobEntry:
        """Return the newest job of a stage. Raises InputError if there is none."""
        if not (entries := self.entries(stage)):
            others = ", ".join(entry.stage for entry in self.entries()) or "none"
            problem = f"no job of stage {stage} in namespace {self.api.namespace}"
            raise InputError(problem, field=f"run {self.run}", hint=f"Stages with a job: {others}")
        return entries[-1]

    def log_lines(self, stage: str, *, follow: bool, pod: str | None, notify: Notify) -> Iterator[str]:
        """Return the lines of the log of rank 0 or of a pod. Raises InputError without such a job or pod."""
        entry = self.entry(stage)
        choose = first_pod if pod is None else newest_pod_named(pod)
        chosen = choose(entry.pods)
        if chosen is None and not (follow and pod is None):
            known, title = ", ".join(map(name_of, entry.pods)) or "none yet", title_of(entry.job)
            if pod is None:
                raise InputError(f"{title} has no pod of rank 0", field=f"run {self.run}", hint=f"It has: {known}")
            raise InputError(f"{title} has no such pod", field="--pod", got=pod, hint=f"It has: {known}")
        return self._follow_log(entry, choose, notify) if follow else self._read_log(chosen, notify)

    def _read_log(self, pod: KubernetesObject | None, notify: Notify) -> Iterator[str]:
        if pod is not None:
            yield from map(printable, ContainerLog(self.api, pod, notify).lines(pod, follow=False))

    def _follow_log(self, entry: JobEntry, choose: PodChooser, notify: Notify) -> Iterator[str]:
        api, lines = self.api.with_retry(retry.UNATTENDED, notify), queue.SimpleQueue[str]()
        with (
            closing(JobObserver(api, entry.job)) as observer,
            closing(LogFollower(api, observer.pods, lines.put, notify, choose)) as follower,
        ):
            next_check = 0.0
            while time.monotonic() < next_check or not observer.state().is_finished:
                if time.monotonic() >= next_check:
                    next_check = time.monotonic() + STATE_CHECK_SECONDS
                try:
                    yield lines.get(timeout=STATE_CHECK_SECONDS)
                except queue.Empty:
                    continue
            follower.finish(30.0)
            while not lines.empty():
                yield lines.get()

    def delete(self, stage: str | None, *, include_finished: bool) -> Sequence[KubernetesObject]:
        """Delete the jobs and return them; their pods save and exit."""
        return stop_jobs(self.api, self.run, stage, include_finished=include_finished).stopped

    def wait_until_gone(self, job: KubernetesObject) -> None:
        """Return when the job and its pods are gone."""
        wait_until_gone(self.api, job)


class PlannedJobs(ClusterJobs):
    """Jobs of some stages of a document, each submitted when the one before it has ended.

    Args:
        api: client of the cluster and namespace.
        config: run document.
        stages: stages in order.
        shard_set: location of the shards; None: that of the document.
    """

    def __init__(
        self, api: ClusterClient, config: RunConfig, stages: Sequence[StageName], shard_set: str | None
    ) -> None:
        super().__init__(api, config.run.id, config)
        self._document, self._stages, self._shard_set = config, tuple(stages), shard_set

    def dry_run(self) -> Iterator[str]:
        """Let the API server check the job of each stage, and yield its title; create nothing."""
        for stage in self._stages:
            manifests = build_manifests(self.api, self._document, stage, self._shard_set)
            dry_run_job(self.api, manifests)
            yield title_of(manifests.job)

    def submit_first(self, out: TextIO) -> None:
        """Submit the first stage, or adopt its job, without waiting; the result goes to `out`."""
        submit_stage(self.api, self._document, self._stages[0], self._shard_set, LinePrinter(out))

    def _results(self, out: TextIO, stop_on_signal: bool) -> Iterator[JobResult]:
        """Submit or adopt the job of each stage in turn, and yield its result when it has ended."""
        for stage in self._stages:
            yield run_stage(self._document, stage, self._shard_set, out=out, stop_on_signal=stop_on_signal)
