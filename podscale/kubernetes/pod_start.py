"""Start of a job's pods, from its creation time and the status of its pods, by pure functions."""

from collections.abc import Sequence
from datetime import datetime

from podscale.kubernetes.logs import first_pod
from podscale.kubernetes.pod_state import main_container, restart_count
from podscale.kubernetes.resources import KubernetesObject, conditions_of, creation_time
from podscale.runs.job_start import JobStart


def read_pod_starts(job: KubernetesObject, pods: Sequence[KubernetesObject]) -> JobStart | None:
    """Return the start of the job's pods; None if one has not started, or if the job has restarted.

    The status of a pod has the time of its container's last start only, and a job that was suspended and resumed does
    not say when.
    """
    leader = first_pod(pods)
    started = [_container_started_at(pod) for pod in pods]
    times = [at for at in started if at is not None]
    if leader is None or len(times) < len(pods) or _has_restarted(job) or any(map(restart_count, pods)):
        return None
    scheduled_at, started_at = _scheduled_at(leader), _container_started_at(leader)
    if scheduled_at is None or started_at is None:
        return None
    return JobStart(creation_time(job).timestamp(), scheduled_at, started_at, max(times), len(pods))


def _has_restarted(job: KubernetesObject) -> bool:
    status = job.get("status") or {}
    return "Restarting" in conditions_of(job) or any(map(status.get, ("failed", "restarts")))


def _scheduled_at(pod: KubernetesObject) -> float | None:
    condition = conditions_of(pod).get("PodScheduled", {})
    return _timestamp(condition.get("lastTransitionTime")) if condition.get("status") == "True" else None


def _container_started_at(pod: KubernetesObject) -> float | None:
    state = (main_container(pod) or {}).get("state") or {}
    return _timestamp((state.get("running") or state.get("terminated") or {}).get("startedAt"))


def _timestamp(text: str | None) -> float | None:
    """Return unix seconds; None for a missing time."""
    return datetime.fromisoformat(text).timestamp() if text else None
