"""Watch a job to its end: report its state, show the log of rank 0, and delete a job that cannot recover.

The job does not depend on this process. After an outage of the API server or an exit of this process, the next
`podscale submit` finds the job and watches it again.

Job and pods are watched. Events and Kueue's Workload are fetched rarely, and only while the job does not run.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from podscale.errors import PodscaleError
from podscale.kubernetes.client import ClusterClient, delete_job
from podscale.kubernetes.errors import ApiError, ApiNotFound
from podscale.kubernetes.informer import Informer
from podscale.kubernetes.job_spec import RUN_LABEL, STAGE_LABEL
from podscale.kubernetes.job_state import JobState, pods_of_job, read_job_state
from podscale.kubernetes.logs import LogFollower
from podscale.kubernetes.pod_state import has_exited, is_running, name_of, trim_pod
from podscale.kubernetes.resources import EVENTS, NAMESPACES, PODS, WORKLOADS, KubernetesObject, ResourceKind
from podscale.kubernetes.retry import Notify

DETAILS_SECONDS = 10.0
"""Shortest time between two fetches of events and quota, seconds."""
JOB_UID_LABEL = "kueue.x-k8s.io/job-uid"
MAX_EVENTS = 50


class JobObserver:
    """One job by its uid, watched until closed; `changed` is set when its state may have changed."""

    def __init__(self, api: ClusterClient, resource: ResourceKind, job: KubernetesObject) -> None:
        self.changed = threading.Event()
        self._api = api
        self._uid = str(job["metadata"]["uid"])
        self._jobs = Informer(api, resource, self.changed, fields=f"metadata.name={name_of(job)}")
        self._pods = Informer(api, PODS, self.changed, labels=pod_selector(job), trim=trim_pod)
        self._last_job = job
        self._last_pods: Sequence[KubernetesObject] | None = None
        self._details: tuple[Sequence[KubernetesObject], KubernetesObject | None] = ((), None)
        self._details_read_at = -DETAILS_SECONDS

    def close(self) -> None:
        self._jobs.close()
        self._pods.close()

    def job(self) -> KubernetesObject | None:
        """Return the newest state of the job; None if it is gone, even if another job has its name now."""
        found = next((job for job in self._jobs.objects() if job["metadata"]["uid"] == self._uid), None)
        self._last_job = found or self._last_job
        return found

    def replaced(self) -> bool:
        """Return whether another job has this one's name."""
        return any(job["metadata"]["uid"] != self._uid for job in self._jobs.objects())

    def pods(self) -> Sequence[KubernetesObject]:
        """Return the newest state of the job's pods."""
        found = self._last_pods if self._last_pods is not None else self._pods.objects()
        return pods_of_job(self._last_job, found)

    def state(self) -> JobState:
        """Return the state now; the reason why the job waits is fetched at most every ASIDE_SECONDS."""
        job, pods = self.job(), self.pods()
        found = read_job_state(job, pods, *self._details)
        if found.is_finished and job is not None:
            return self._final_state(job)
        if job is None or found.phase in ("running", "stopped"):
            return found
        if time.monotonic() - self._details_read_at >= DETAILS_SECONDS:
            self._details_read_at = time.monotonic()
            self._details = read_events_and_workload(self._api, job, pods)
            found = read_job_state(job, pods, *self._details)
        return found

    def _final_state(self, job: KubernetesObject) -> JobState:
        """Return the state at the end; pods are fetched once more, because their watch may lag behind the job's."""
        if self._last_pods is None:
            self._last_pods, _ = self._api.list(PODS, labels=pod_selector(job), keep=trim_pod)
        return read_job_state(job, self.pods())


@contextmanager
def observe_job(api: ClusterClient, resource: ResourceKind, job: KubernetesObject) -> Iterator[JobObserver]:
    observer = JobObserver(api, resource, job)
    try:
        yield observer
    finally:
        observer.close()


def read_events_and_workload(
    api: ClusterClient, job: KubernetesObject, pods: Sequence[KubernetesObject]
) -> tuple[Sequence[KubernetesObject], KubernetesObject | None]:
    """Return events of the job, of the jobs it owns and of one pod that waits, and Kueue's Workload if it is suspended.

    Kinds that these credentials may not list, or that the cluster does not have, are left out.
    """
    waiting = [pod for pod in pods if not is_running(pod) and not has_exited(pod)]
    names = [name_of(job), *_child_job_names(job), *map(name_of, waiting[:1])]
    events = [event for name in names for event in _list_or_empty(api, EVENTS, fields=f"involvedObject.name={name}")]
    suspended = read_job_state(job).phase == "queued"
    labels = f"{JOB_UID_LABEL}={job['metadata']['uid']}"
    workloads = _list_or_empty(api, WORKLOADS, labels=labels) if suspended else []
    return [event for event in events if _concerns(event, job)], next(iter(workloads), None)


def pod_selector(job: KubernetesObject) -> str:
    """Return the label selector of a job's pods."""
    labels = job["metadata"].get("labels") or {}
    return ",".join(f"{name}={labels[name]}" for name in (RUN_LABEL, STAGE_LABEL) if name in labels)


def _list_or_empty(
    api: ClusterClient, resource: ResourceKind, *, labels: str = "", fields: str = ""
) -> list[KubernetesObject]:
    try:
        return api.list(resource, labels=labels, fields=fields, limit=MAX_EVENTS)[0]
    except ApiError:
        return []


def _child_job_names(job: KubernetesObject) -> list[str]:
    """Return the names of the first jobs that a JobSet or TrainJob makes; events of refused pods are theirs."""
    name, spec = name_of(job), job.get("spec") or {}
    if job["kind"] == "TrainJob":
        return [f"{name}-node-0"]
    if job["kind"] == "JobSet":
        return [f"{name}-{part['name']}-0" for part in spec.get("replicatedJobs") or ()]
    return []


def _concerns(event: KubernetesObject, job: KubernetesObject) -> bool:
    """Return whether an event is about this job, not an earlier one of the same name."""
    series = event.get("series") or {}
    last = series.get("lastObservedTime") or event.get("lastTimestamp") or event.get("eventTime")
    return last is None or str(last)[:19] >= str(job["metadata"]["creationTimestamp"])[:19]


PrintLine = Callable[[str], None]
"""Takes one line of the job's log."""


@dataclass(frozen=True)
class WaitLimits:
    """Time limits, seconds.

    Args:
        max_poll_seconds: longest time between two looks at the job.
        min_poll_seconds: shortest time between two looks.
        permanent_seconds: timeout for conditions that need an operator.
        log_seconds: timeout for the end of the log.
    """

    max_poll_seconds: float = 5.0
    min_poll_seconds: float = 0.5
    permanent_seconds: float = 300.0
    log_seconds: float = 30.0


class JobVanished(PodscaleError):
    """The job was deleted during the wait for it; the field is the job."""


class JobReplaced(JobVanished):
    """Another job of its name was submitted."""


class NamespaceGone(JobVanished):
    """Its namespace was deleted; the field is the namespace."""


def wait_for_job(
    api: ClusterClient,
    resource: ResourceKind,
    job: KubernetesObject,
    *,
    print_line: PrintLine,
    notify: Notify,
    limits: WaitLimits | None = None,
) -> JobState:
    """Wait until the job has ended; return its last state, whose `ending` has the exit of the stage.

    A job whose input is bad, or that never ran and waits for an operator, is deleted and counts as failed. A job that
    ran is left: a replacement pod that cannot start (a registry or a node is down) does not undo its work. Raises
    JobVanished if another process deletes the job, and the errors of ClusterClient.
    """
    limits = limits or WaitLimits()
    with observe_job(api, resource, job) as observer:
        log = LogFollower(api, observer.pods, print_line, notify)
        state = _JobWatcher(api, resource, job, observer, notify, limits).wait()
        log.finish(limits.log_seconds)
        return state


class _JobWatcher:
    """Waits for one job: its last reported state, and the time since when it needs an operator."""

    def __init__(
        self,
        api: ClusterClient,
        resource: ResourceKind,
        job: KubernetesObject,
        observer: JobObserver,
        tell: Notify,
        limits: WaitLimits,
    ) -> None:
        self._api = api
        self._resource = resource
        self._name = name_of(job)
        self._uid = str(job["metadata"]["uid"])
        self._observer = observer
        self._tell = tell
        self._limits = limits
        self._told = ""
        self._stuck_since: float | None = None
        self._ran = False

    def wait(self) -> JobState:
        while True:
            self._observer.changed.clear()
            state = self._observer.state()
            if state.phase == "gone":
                raise self._vanished()
            self._report(state)
            if state.is_finished:
                return state
            if state.stage_exit is not None and state.stage_exit.is_bad_input:
                return self._give_up(state, state.stage_exit.first_line)
            if self._needs_operator(state):
                return self._give_up(state, state.reason)
            self._observer.changed.wait(self._limits.max_poll_seconds)
            time.sleep(self._limits.min_poll_seconds)  # many pods change at once

    def _report(self, state: JobState) -> None:
        if str(state) != self._told:
            self._told = str(state)
            self._tell(self._told)

    def _needs_operator(self, state: JobState) -> bool:
        """Return whether the job never ran, and has waited for an operator longer than `hopeless`."""
        self._ran = self._ran or state.has_run
        if not state.is_permanent or self._ran:
            self._stuck_since = None
            return False
        self._stuck_since = self._stuck_since or time.monotonic()
        return time.monotonic() - self._stuck_since > self._limits.permanent_seconds

    def _give_up(self, state: JobState, why: str) -> JobState:
        """Delete the job, which would only fail or wait again."""
        self._tell(f"{self._resource.kind} {self._name} is deleted, because no restart can help: {why}")
        delete_job(self._api, self._resource, self._name, self._uid)
        return replace(state, phase="failed", reason=why)

    def _vanished(self) -> JobVanished:
        job = f"{self._resource.kind} {self._name}"
        if self._observer.replaced():
            problem = "was deleted and submitted anew by another client; this command no longer waits for it"
            return JobReplaced(problem, field=job)
        if _is_namespace_terminating(self._api):
            return NamespaceGone(
                f"was deleted, and {job} with it; what is on volumes outside of it is kept",
                field=f"namespace {self._api.namespace}",
                hint="Make the namespace again and submit again: training goes on from the newest checkpoint.",
            )
        hint = "Submit again to go on from the newest checkpoint."
        return JobVanished("was deleted by another client, or by `podscale stop`", field=job, hint=hint)


def _is_namespace_terminating(api: ClusterClient) -> bool:
    try:
        phase = (api.get(NAMESPACES, api.namespace).get("status") or {}).get("phase")
    except ApiNotFound:
        return True
    except ApiError:
        return False  # a role in one namespace may not read the namespace itself
    return bool(phase == "Terminating")
