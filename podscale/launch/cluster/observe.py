"""State of one job, kept current with few requests.

Job and pods are watched. Events and Kueue's Workload are fetched only while the job does not run, and seldom.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from podscale.launch.cluster.api import ClusterClient
from podscale.launch.cluster.errors import ApiError
from podscale.launch.cluster.mirror import Informer
from podscale.launch.cluster.pods import has_exited, is_running, name_of, trim_pod
from podscale.launch.cluster.resources import EVENTS, PODS, WORKLOADS, KubernetesObject, ResourceKind
from podscale.launch.cluster.state import JobState, pods_of_job, read_job_state
from podscale.launch.jobspec import RUN_LABEL, STAGE_LABEL

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
