"""State of a job's pods, by pure functions of their status: whether one runs, its problem, and the exit of its stage.

For all pods together: the pod of rank 0, the cause of a failure, and the start of the job.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from podscale.errors import ExitCode
from podscale.kubernetes import termination_message
from podscale.kubernetes.resources import (
    STAGE_CONTAINERS,
    KubernetesObject,
    conditions_of,
    creation_time,
    is_being_deleted,
    labels_of,
    name_of,
)
from podscale.runs.job_start import JobStart
from podscale.util.formatting import one_line

PERMANENT_WAIT_REASONS = {
    "ErrImagePull": "check the name of the image and, for a private registry, launch.cluster.image_pull_secrets",
    "ImagePullBackOff": "check the name of the image and, for a private registry, launch.cluster.image_pull_secrets",
    "InvalidImageName": "correct launch.image",
    "ErrImageNeverPull": "the node does not have the image and may not fetch it: push it to a registry, or load it "
    "into the nodes, or change launch.cluster.image_pull_policy",
    "CreateContainerConfigError": "correct the Secret, ConfigMap or user that the pod names",
    "CreateContainerError": "the node cannot create the container",
    "RunContainerError": "the node cannot start the container: is `podscale` in the image?",
}
"""Waiting reasons that only a person can fix, with what to do."""

START_FAILURE_REASONS = ("StartError", "ContainerCannotRun")
"""Termination reasons of a container whose command did not start (containerd; older runtimes)."""
_FIRST_LABELS = (
    ("training.kubeflow.org/replica-index", "0"),
    ("jobset.sigs.k8s.io/job-index", "0"),
    ("batch.kubernetes.io/job-completion-index", "0"),
)
"""Labels of the pod of rank 0, as far as its operator sets them."""


@dataclass(frozen=True)
class StageExit:
    """Exit of a stage in one pod: exit code and error, as the stage reported them."""

    exit_code: int
    error: str
    pod: str

    @property
    def first_line(self) -> str:
        """First line of the error; the rest is details and advice."""
        return next(iter(self.error.splitlines()), "")

    @property
    def is_bad_input(self) -> bool:
        """True if the input is bad, so that no restart can help."""
        return self.exit_code == ExitCode.BAD_INPUT


@dataclass(frozen=True)
class PodProblem:
    """Reason why a pod does not run; `is_permanent` if only a person can fix it.

    Args:
        topic: what the reason is about, such as an image, if the cluster describes one problem in several texts.
    """

    reason: str
    is_permanent: bool = False
    topic: str = ""


def trim_pod(pod: KubernetesObject) -> KubernetesObject:
    """Return the part of a pod that this module reads, to save memory: large jobs have many pods with equal specs."""
    metadata, status = pod.get("metadata") or {}, pod.get("status") or {}
    keep = ("name", "uid", "labels", "creationTimestamp", "deletionTimestamp", "resourceVersion")
    parts = ("phase", "reason", "message", "conditions", "containerStatuses", "initContainerStatuses")
    return {
        "metadata": {name: metadata[name] for name in keep if name in metadata},
        "spec": {"nodeName": (pod.get("spec") or {}).get("nodeName")},
        "status": {name: status[name] for name in parts if name in status},
    }


def first_pod(pods: Sequence[KubernetesObject]) -> KubernetesObject | None:
    """Return the newest pod of rank 0, which is a master or has index 0; None if there is none yet."""
    firsts = [pod for pod in pods if all(labels_of(pod).get(name, value) == value for name, value in _FIRST_LABELS)]
    masters = [pod for pod in firsts if labels_of(pod).get("training.kubeflow.org/replica-type") == "master"]
    return max(masters or firsts, key=creation_time, default=None)


def main_container(pod: KubernetesObject) -> KubernetesObject | None:
    """Return the status of the stage's container; None before the node reports it."""
    statuses: list[KubernetesObject] = (pod.get("status") or {}).get("containerStatuses") or []
    first = statuses[0] if statuses else None
    return next((status for status in statuses if status["name"] in STAGE_CONTAINERS.values()), first)


def restart_count(pod: KubernetesObject) -> int:
    """Return the number of restarts of the stage's container by its node."""
    container = main_container(pod)
    return int(container.get("restartCount", 0)) if container else 0


def is_running(pod: KubernetesObject) -> bool:
    container = main_container(pod) or {}
    return "running" in (container.get("state") or {}) and not is_being_deleted(pod)


def has_run(pod: KubernetesObject) -> bool:
    """Return whether the stage's container runs or has run."""
    container = main_container(pod) or {}
    states = [container.get("state") or {}, container.get("lastState") or {}]
    reasons = [state["terminated"].get("reason") for state in states if "terminated" in state]
    return "running" in states[0] or any(reason not in START_FAILURE_REASONS for reason in reasons)


def has_exited(pod: KubernetesObject) -> bool:
    """Return whether the pod has ended, so that none of its containers will run again."""
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


def stage_exits(pod: KubernetesObject) -> Iterator[StageExit]:
    """Yield the exits of the stage in this pod, newest first: the last one and the one before the last restart."""
    status = pod.get("status") or {}
    if status.get("phase") == "Failed" and status.get("reason"):  # such as an eviction, which ended the container
        yield StageExit(int(ExitCode.FAILED), _lost_pod_message(status), name_of(pod))
    container = main_container(pod) or {}
    for key in ("state", "lastState"):
        terminated = (container.get(key) or {}).get("terminated")
        if terminated is not None:
            yield _stage_exit(terminated, name_of(pod))


def interrupted_exit(pods: Iterable[KubernetesObject]) -> StageExit | None:
    """Return the exit of a stage that is not done although its pod succeeded; None if there is none.

    Pods of an abandoned job (podscale.runs.launcher_heartbeat) exit with 0, so that no operator restarts them, and
    report the code of a stop.
    """
    for pod in pods:
        terminated = ((main_container(pod) or {}).get("state") or {}).get("terminated")
        if terminated is not None and terminated.get("exitCode") == 0:
            stage_exit = _stage_exit(terminated, name_of(pod))
            if stage_exit.exit_code != ExitCode.DONE:
                return stage_exit
    return None


def root_cause(pods: Iterable[KubernetesObject]) -> StageExit | None:
    """Return the exit that explains the others: first bad input, then an error, a hang, a preemption, a lost peer."""
    failures = (stage_exit for pod in pods for stage_exit in stage_exits(pod) if stage_exit.exit_code != ExitCode.DONE)
    return min(failures, key=_cause_rank, default=None)


def _cause_rank(stage_exit: StageExit) -> int:
    """Return the order of a cause, lowest first: the others may be its consequences, as a lost peer always is."""
    ranks: dict[int, int] = {ExitCode.BAD_INPUT: 0, ExitCode.HANG: 2, ExitCode.PREEMPTED: 3, ExitCode.PEER_LOST: 4}
    return ranks.get(stage_exit.exit_code, 1)


def _stage_exit(terminated: KubernetesObject, pod: str) -> StageExit:
    code, text = int(terminated.get("exitCode", 1)), str(terminated.get("message") or "")
    reason = str(terminated.get("reason") or "")
    report = termination_message.parse_termination_message(text)
    if reason == "OOMKilled":
        error = f"{report['error']}; " if report is not None and report["error"] else ""
        error += "the container ran out of memory (OOMKilled): raise launch.resources.memory_gib or lower the batch"
        return StageExit(report["exit_code"] if report else code or 1, error, pod)
    if report is not None:
        return StageExit(report["exit_code"], report["error"], pod)
    if code > 128:
        killed = f"the container was killed by signal {code - 128}"
        return StageExit(code, f"{killed}: {one_line(text)}" if text else killed, pod)
    return StageExit(code, one_line(text) or f"the container exited with code {code} ({reason})", pod)


def _lost_pod_message(status: KubernetesObject) -> str:
    message = str(status.get("message") or "")
    if status["reason"] == "Evicted":
        return f"the node evicted the pod: {message.rstrip('.')}. Request enough resources (launch.resources)"
    return f"{status['reason']}: {message}" if message else str(status["reason"])


def find_problem(pod: KubernetesObject) -> PodProblem | None:
    """Return why this pod does not run; None if it runs, has ended or is starting normally."""
    status = pod.get("status") or {}
    if has_exited(pod):
        return None
    scheduled = conditions_of(pod).get("PodScheduled", {})
    if scheduled.get("status") == "False":
        problem = "scheduling gated" if scheduled.get("reason") == "SchedulingGated" else "unschedulable"
        return PodProblem(f"{problem}: {scheduled.get('message') or ''}")
    containers = [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]
    return next((problem for problem in map(_waiting_problem, containers) if problem is not None), None)


def _waiting_problem(container: KubernetesObject) -> PodProblem | None:
    waiting: Any = (container.get("state") or {}).get("waiting")
    if not waiting or waiting.get("reason") in (None, "ContainerCreating", "PodInitializing"):
        return None
    reason, message = str(waiting["reason"]), one_line(str(waiting.get("message") or ""))
    if reason == "CrashLoopBackOff":
        last = (container.get("lastState") or {}).get("terminated")
        error = _stage_exit(last, "").first_line if last else message
        return PodProblem(f"its container {container['name']} failed and restarts after a pause: {error}")
    advice = PERMANENT_WAIT_REASONS.get(reason)
    topic = f"image {container['image']}" if "Image" in reason else ""
    image = f" ({topic})" if topic else ""
    text = f"{reason}: {message}{image}" if message else f"{reason}{image}"
    return PodProblem(f"{text}; {advice}", is_permanent=True, topic=topic) if advice else PodProblem(text, topic=topic)


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
