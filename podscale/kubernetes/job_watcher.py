"""Watch a job to its end: report its state, show the log of rank 0, and delete a job that cannot recover.

The job does not depend on this process: the next `podscale submit` adopts it. Job and pods are watched. Events and
Kueue's Workload are fetched while the job does not run, every DETAILS_SECONDS, and less often while nothing changes.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from heapq import nlargest
from typing import NamedTuple

from podscale.errors import PodscaleError
from podscale.kubernetes.client import ClusterClient, delete_object
from podscale.kubernetes.errors import ApiError, ApiNotFound
from podscale.kubernetes.informer import Informer
from podscale.kubernetes.job_state import JobState, event_time, pod_selector, pods_of_job, read_job_state
from podscale.kubernetes.logs import LogFollower
from podscale.kubernetes.pod_state import find_problem, first_pod, has_exited, is_running, read_pod_starts, trim_pod
from podscale.kubernetes.resources import (
    EVENTS,
    NAMESPACES,
    PODS,
    WORKLOADS,
    KubernetesObject,
    ResourceKind,
    name_of,
    resource_of,
    title_of,
    uid_of,
)
from podscale.kubernetes.retry import GrowingPause, Notify
from podscale.kubernetes.workload_state import JOB_UID_LABEL, preemptor_uid
from podscale.runs.job_start import JobStart

DETAILS_SECONDS = 10.0
"""Minimal time between two fetches of events and Workload, seconds."""
MAX_DETAILS_SECONDS = 60.0
"""Maximal time between two fetches, seconds. It is reached while a job waits for the same reason."""
MAX_EVENTS = 50
"""Newest events that are read of each object."""


class JobObserver:
    """Watch of one job and its pods until closed. The event `changed` is set when the state may have changed."""

    def __init__(self, api: ClusterClient, job: KubernetesObject) -> None:
        self.changed = threading.Event()
        self._api = api
        self._jobs = Informer(api, resource_of(job), self.changed, fields=f"metadata.name={name_of(job)}")
        self._pods = Informer(api, PODS, self.changed, labels=pod_selector(job), trim=trim_pod)
        self._last_job = job
        self._last_pods: Sequence[KubernetesObject] | None = None
        self._details = JobDetails()
        self._details_pause = GrowingPause(DETAILS_SECONDS, MAX_DETAILS_SECONDS)
        self._details_phase = ""

    def close(self) -> None:
        self._jobs.close()
        self._pods.close()

    def job(self) -> KubernetesObject | None:
        """Return the current job; None if it is gone, even if another job has its name now."""
        for job in self._jobs.objects():
            if uid_of(job) == uid_of(self._last_job):
                self._last_job = job
                return job
        return None

    def replaced(self) -> bool:
        """Return True if another job has this job's name now."""
        return any(uid_of(job) != uid_of(self._last_job) for job in self._jobs.objects())

    def pods(self) -> Sequence[KubernetesObject]:
        """Return the pods of the job, not those of an earlier job of the same name."""
        return pods_of_job(self._last_job, self._pods.objects() if self._last_pods is None else self._last_pods)

    def state(self) -> JobState:
        """Return the current state. The reason of a wait, from events and Workload, may be MAX_DETAILS_SECONDS old."""
        job, pods = self.job(), self.pods()
        state = read_job_state(job, pods, *self._details)
        if job is None or state.phase in ("running", "stopped"):
            return state
        if state.is_finished:
            return self._final_state(job)
        if state.phase != self._details_phase:
            self._details_phase = state.phase
            self._details_pause.shorten()
        if not self._details_pause.is_over:
            return state
        self._details = read_details(self._api, job, pods)
        explained = read_job_state(job, pods, *self._details)
        self._details_pause.attempted(in_vain=explained == state)
        return explained

    def _final_state(self, job: KubernetesObject) -> JobState:
        """Return the final state from a new list of pods, because their watch may lag behind the job's."""
        if self._last_pods is None:
            self._last_pods, _ = self._api.list(PODS, labels=pod_selector(job), keep=trim_pod)
        return read_job_state(job, self.pods())


class JobDetails(NamedTuple):
    """Arguments of `read_job_state` that explain why a job waits."""

    events: Sequence[KubernetesObject] = ()
    workload: KubernetesObject | None = None
    preemptor: KubernetesObject | None = None


def read_details(api: ClusterClient, job: KubernetesObject, pods: Sequence[KubernetesObject]) -> JobDetails:
    """Return Kueue's Workload of a queued job, else events of the job, its child jobs and one waiting pod.

    Events are left out if the pods have the reason themselves, because the API server reads all events of the namespace
    for each request. Kinds that these credentials may not list, or that the cluster does not serve, are left out, and
    so is a preemptor in another namespace.
    """
    phase = read_job_state(job, pods).phase
    if phase == "queued":
        workload = _workload_of(api, uid_of(job))
        preemptor = preemptor_uid(workload) if workload is not None else ""
        return JobDetails((), workload, _workload_of(api, preemptor) if preemptor else None)
    if phase in ("running", "stopped") or any(map(find_problem, pods)):
        return JobDetails()
    waiting = [pod for pod in pods if not is_running(pod) and not has_exited(pod)]
    names = [name_of(job), *_child_job_names(job), *map(name_of, waiting[:1])]
    events = [event for name in names for event in _newest_events(api, name) if _concerns(event, job)]
    return JobDetails(events)


def _workload_of(api: ClusterClient, job_uid: str) -> KubernetesObject | None:
    return next(iter(_list_or_empty(api, WORKLOADS, labels=f"{JOB_UID_LABEL}={job_uid}")), None)


def _newest_events(api: ClusterClient, name: str) -> list[KubernetesObject]:
    """Return the newest events of an object; the API server lists them in no order."""
    return nlargest(MAX_EVENTS, _list_or_empty(api, EVENTS, fields=f"involvedObject.name={name}"), key=event_time)


def _list_or_empty(
    api: ClusterClient, resource: ResourceKind, *, labels: str = "", fields: str = ""
) -> list[KubernetesObject]:
    try:
        return api.list(resource, labels=labels, fields=fields)[0]
    except ApiError:
        return []


def _child_job_names(job: KubernetesObject) -> list[str]:
    """Return the names of the first child jobs of a JobSet or TrainJob: events about refused pods name these."""
    name, spec = name_of(job), job.get("spec") or {}
    if job["kind"] == "TrainJob":
        return [f"{name}-node-0"]
    if job["kind"] == "JobSet":
        return [f"{name}-{child['name']}-0" for child in spec.get("replicatedJobs") or ()]
    return []


def _concerns(event: KubernetesObject, job: KubernetesObject) -> bool:
    """Return True if an event is not older than this job, so it is not about an earlier job of the same name."""
    last = event_time(event)
    return not last or last[:19] >= str(job["metadata"]["creationTimestamp"])[:19]


PrintLine = Callable[[str], None]
OnStarted = Callable[[JobStart, KubernetesObject], None]
"""Takes the start of a job's pods, and the leading pod."""


@dataclass(frozen=True)
class WaitLimits:
    """Time limits of `wait_for_job`, seconds.

    Args:
        max_poll_seconds: maximal time between two polls of the job's state.
        min_poll_seconds: minimal time between two polls.
        permanent_seconds: time after which a job is deleted that cannot start until a person fixes the cause.
        log_seconds: time to fetch the rest of the log after the job has ended.
    """

    max_poll_seconds: float = 5.0
    min_poll_seconds: float = 0.5
    permanent_seconds: float = 300.0
    log_seconds: float = 30.0


class JobVanished(PodscaleError):
    """The job was deleted during the wait; the field is the job."""


class JobReplaced(JobVanished):
    """Another job of the same name was submitted."""


class NamespaceGone(JobVanished):
    """The namespace was deleted; the field is the namespace."""


def wait_for_job(
    api: ClusterClient,
    job: KubernetesObject,
    *,
    print_line: PrintLine,
    notify: Notify,
    limits: WaitLimits | None = None,
    on_started: OnStarted = lambda start, leader: None,
) -> JobState:
    """Wait until the job has ended; return its last state. Raises JobVanished if another client deletes it.

    Two kinds of job are deleted and count as failed: one with bad input, and one that never ran and cannot start until
    a person fixes the cause. If a job has run and a replacement pod cannot start, the job stays, because what it
    has saved is not lost.

    Args:
        print_line: Receives the lines of rank 0's log.
        notify: Receives each new state of the job.
        on_started: Receives the start of the pods once all run, unless the job has restarted before.
    """
    limits = limits or WaitLimits()
    with (
        closing(JobObserver(api, job)) as observer,
        closing(LogFollower(api, observer.pods, print_line, notify)) as log,
    ):
        state = _JobWatcher(api, job, observer, notify, limits, on_started).wait()
        log.finish(limits.log_seconds)
        return state


class _JobWatcher:
    """Loop of `wait_for_job` over the states of one job."""

    def __init__(
        self,
        api: ClusterClient,
        job: KubernetesObject,
        observer: JobObserver,
        notify: Notify,
        limits: WaitLimits,
        on_started: OnStarted,
    ) -> None:
        self._api = api
        self._job = job
        self._observer = observer
        self._notify = notify
        self._limits = limits
        self._on_started = on_started
        self._started = False
        self._reported = ""
        self._reported_topics: set[str] = set()
        self._stuck_since: float | None = None
        self._has_run = False

    def wait(self) -> JobState:
        while True:
            self._observer.changed.clear()
            state = self._observer.state()
            if state.phase == "gone":
                raise self._vanished_error()
            self._report(state)
            self._report_start(state)
            if state.is_finished:
                return state
            if state.stage_exit is not None and state.stage_exit.is_bad_input:
                return self._delete_job(state, state.stage_exit.first_line)
            if self._needs_operator(state):
                return self._delete_job(state, state.reason)
            self._observer.changed.wait(self._limits.max_poll_seconds)
            time.sleep(self._limits.min_poll_seconds)  # one poll for many pods that change at once

    def _report(self, state: JobState) -> None:
        """Report a new state, and a problem that the cluster repeats for each pod once until the job runs."""
        if state.phase == "running":
            self._reported_topics.clear()
        if str(state) == self._reported or state.topic in self._reported_topics:
            return
        self._reported = str(state)
        self._reported_topics |= {state.topic} if state.topic else set()
        self._notify(self._reported)

    def _report_start(self, state: JobState) -> None:
        """Report the start of the pods when all run for the first time."""
        if state.phase != "running" or self._started:
            return
        self._started = True
        pods = self._observer.pods()
        start, leader = read_pod_starts(self._observer.job() or self._job, pods), first_pod(pods)
        if start is not None and leader is not None:
            self._notify(str(start))
            self._on_started(start, leader)

    def _needs_operator(self, state: JobState) -> bool:
        """Return True if the job never ran and has had a permanent problem for more than `permanent_seconds`."""
        self._has_run = self._has_run or state.has_run
        if not state.is_permanent or self._has_run:
            self._stuck_since = None
            return False
        self._stuck_since = self._stuck_since or time.monotonic()
        return time.monotonic() - self._stuck_since > self._limits.permanent_seconds

    def _delete_job(self, state: JobState, reason: str) -> JobState:
        self._notify(f"{title_of(self._job)} is deleted, because no restart can help: {reason}")
        delete_object(self._api, self._job)
        return replace(state, phase="failed", reason=reason)

    def _vanished_error(self) -> JobVanished:
        job = title_of(self._job)
        if self._observer.replaced():
            problem = "was deleted and submitted again by another client; this command no longer waits for it"
            return JobReplaced(problem, field=job)
        if _is_namespace_terminating(self._api):
            return NamespaceGone(
                f"was deleted, and {job} with it; volumes outside of it remain",
                field=f"namespace {self._api.namespace}",
                hint="Create the namespace and submit again: training resumes from the newest checkpoint.",
            )
        hint = "Submit again to resume from the newest checkpoint."
        return JobVanished("was deleted by another client, or by `podscale stop`", field=job, hint=hint)


def _is_namespace_terminating(api: ClusterClient) -> bool:
    try:
        phase = (api.get(NAMESPACES, api.namespace).get("status") or {}).get("phase")
    except ApiNotFound:
        return True
    except ApiError:
        return False  # a role in one namespace does not permit reading namespaces
    return bool(phase == "Terminating")
