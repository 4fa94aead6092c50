"""State of one pod, from its status: whether it runs, why not, and the exit of its stage."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from podscale.errors import ExitCode
from podscale.kubernetes import termination_message
from podscale.kubernetes.resources import JOB_BACKENDS, KubernetesObject
from podscale.util.formatting import one_line

STAGE_CONTAINERS = {backend.container for backend in JOB_BACKENDS.values()}
"""Names of the container that carries out the stage."""

PERMANENT_WAIT_REASONS = {
    "ErrImagePull": "check the name of the image and, for a private registry, launch.cluster.image_pull_secrets",
    "ImagePullBackOff": "check the name of the image and, for a private registry, launch.cluster.image_pull_secrets",
    "InvalidImageName": "correct launch.image",
    "ErrImageNeverPull": "the node does not have the image and may not fetch it: push it to a registry, or load it "
    "into the nodes, or change launch.cluster.image_pull_policy",
    "CreateContainerConfigError": "a Secret, ConfigMap or user that the pod names is not usable",
    "CreateContainerError": "the node cannot make the container",
    "RunContainerError": "the node cannot start the container: is `podscale` in the image?",
}
"""Reasons for waiting that pass only when somebody changes something, with what to change."""

START_FAILURE_REASONS = ("StartError", "ContainerCannotRun")
"""Reasons for the end of a container whose command could not even be started (containerd; older runtimes)."""


@dataclass(frozen=True)
class StageExit:
    """Exit of a stage in one pod: exit code and error, as the stage reported them."""

    exit_code: int
    error: str
    pod: str

    @property
    def first_line(self) -> str:
        """Return the first line of an error; later lines are details and advice."""
        return next(iter(self.error.splitlines()), "")

    @property
    def is_bad_input(self) -> bool:
        """Return True if the input is bad: no restart can help."""
        return self.exit_code == ExitCode.BAD_INPUT


@dataclass(frozen=True)
class PodProblem:
    """Reason why a pod does not run; `is_permanent` if only an operator can fix it."""

    reason: str
    is_permanent: bool = False


def trim_pod(pod: KubernetesObject) -> KubernetesObject:
    """Return the part of a pod that is read here: large jobs have many pods with equal specs."""
    metadata, status = pod.get("metadata") or {}, pod.get("status") or {}
    keep = ("name", "uid", "labels", "creationTimestamp", "deletionTimestamp", "resourceVersion")
    parts = ("phase", "reason", "message", "conditions", "containerStatuses", "initContainerStatuses")
    return {
        "metadata": {name: metadata[name] for name in keep if name in metadata},
        "spec": {"nodeName": (pod.get("spec") or {}).get("nodeName")},
        "status": {name: status[name] for name in parts if name in status},
    }


def name_of(thing: KubernetesObject) -> str:
    return str(thing["metadata"]["name"])


def creation_time(thing: KubernetesObject) -> datetime:
    """Return the creation time that the API server recorded."""
    return datetime.fromisoformat(str(thing["metadata"]["creationTimestamp"]))


def main_container(pod: KubernetesObject) -> KubernetesObject | None:
    """Return the status of the stage's container; None before the node reports it."""
    statuses: list[KubernetesObject] = (pod.get("status") or {}).get("containerStatuses") or []
    return next((found for found in statuses if found["name"] in STAGE_CONTAINERS), statuses[0] if statuses else None)


def restart_count(pod: KubernetesObject) -> int:
    """Return how often the node restarted the stage's container."""
    container = main_container(pod)
    return int(container.get("restartCount", 0)) if container else 0


def is_running(pod: KubernetesObject) -> bool:
    container = main_container(pod)
    leaving = "deletionTimestamp" in pod["metadata"]
    return container is not None and "running" in (container.get("state") or {}) and not leaving


def has_run(pod: KubernetesObject) -> bool:
    """Return True if the stage's container runs or has run."""
    container = main_container(pod) or {}
    states = [container.get("state") or {}, container.get("lastState") or {}]
    ends = [state["terminated"].get("reason") for state in states if "terminated" in state]
    return "running" in states[0] or any(reason not in START_FAILURE_REASONS for reason in ends)


def has_exited(pod: KubernetesObject) -> bool:
    """Return True if no container of the pod will run again."""
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


def stage_exits(pod: KubernetesObject) -> Iterator[StageExit]:
    """Return the exits of the stage in this pod, newest first; a running container has the exit before its restart."""
    status = pod.get("status") or {}
    if status.get("phase") == "Failed" and status.get("reason"):  # evicted, say: that explains the container's end
        yield StageExit(int(ExitCode.FAILED), _lost_pod_message(status), name_of(pod))
    container = main_container(pod)
    for where in ("state", "lastState"):
        terminated = ((container or {}).get(where) or {}).get("terminated")
        if terminated is not None:
            yield _stage_exit(terminated, name_of(pod))


def root_cause(pods: Iterable[KubernetesObject]) -> StageExit | None:
    """Return the exit that explains the others: bad input, a stage's own error, a hang, a lost peer."""
    found = [ending for pod in pods for ending in stage_exits(pod) if ending.exit_code != ExitCode.DONE]
    return min(found, key=_cause_rank, default=None)


def _cause_rank(stage_exit: StageExit) -> int:
    """Lower explains more; a peer's loss, and what torchrun makes of it, follow from something else."""
    order = (ExitCode.BAD_INPUT, ExitCode.HANG, ExitCode.PREEMPTED, ExitCode.PEER_LOST)
    return {int(code): place for code, place in zip(order, (0, 2, 3, 4), strict=True)}.get(stage_exit.exit_code, 1)


def _stage_exit(terminated: KubernetesObject, pod: str) -> StageExit:
    code, text = int(terminated.get("exitCode", 1)), str(terminated.get("message") or "")
    reason = str(terminated.get("reason") or "")
    told = termination_message.parse_termination_message(text)
    if reason == "OOMKilled":
        before = f"{told['error']}; " if told is not None and told["error"] else ""
        memory = "the container ran out of memory (OOMKilled): raise launch.resources.memory_gib or lower the batch"
        return StageExit(told["exit_code"] if told else code or 1, before + memory, pod)
    if told is not None:
        return StageExit(told["exit_code"], told["error"], pod)
    if code > 128:
        killed = f"the container was killed by signal {code - 128}"
        return StageExit(code, f"{killed}: {one_line(text)}" if text else killed, pod)
    return StageExit(code, one_line(text) or f"the container ended with exit code {code} ({reason})", pod)


def _lost_pod_message(status: KubernetesObject) -> str:
    message = str(status.get("message") or "")
    if status["reason"] == "Evicted":
        return f"the node evicted the pod: {message} Ask for what it needs (launch.resources)".replace("..", ".")
    return f"{status['reason']}: {message}" if message else str(status["reason"])


def find_problem(pod: KubernetesObject) -> PodProblem | None:
    """Return why this pod does not run; None if it runs, has ended or is only starting."""
    status = pod.get("status") or {}
    if has_exited(pod):
        return None
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            gated = condition.get("reason") == "SchedulingGated"
            text = str(condition.get("message") or "")
            return PodProblem(f"{'held back' if gated else 'no node for it'}: {text}")
    for container in _container_statuses(status):
        found = _waiting_problem(container)
        if found is not None:
            return found
    return None


def _container_statuses(status: KubernetesObject) -> Sequence[KubernetesObject]:
    return [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]


def _waiting_problem(container: KubernetesObject) -> PodProblem | None:
    waiting: Any = (container.get("state") or {}).get("waiting")
    if not waiting or waiting.get("reason") in (None, "ContainerCreating", "PodInitializing"):
        return None
    reason, message = str(waiting["reason"]), one_line(str(waiting.get("message") or ""))
    if reason == "CrashLoopBackOff":
        last = ((container.get("lastState") or {}).get("terminated")) or {}
        why = _stage_exit(last, "").first_line if last else message
        return PodProblem(f"its container {container['name']} failed and is started again after a pause: {why}")
    advice = PERMANENT_WAIT_REASONS.get(reason)
    image = f" (image {container['image']})" if "Image" in reason else ""
    text = f"{reason}: {message}{image}" if message else f"{reason}{image}"
    return PodProblem(f"{text}; {advice}", is_permanent=True) if advice else PodProblem(text)
