"""Job of Kubernetes itself: for stages of one pod, and for shards that several pods make independently."""

from typing import Any

from podscale.errors import ExitCode, InputError
from podscale.launch.backends import BACKENDS
from podscale.launch.jobspec import JobSpec
from podscale.launch.render import common, pod

CONTAINER = BACKENDS["job"].container
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
"""Field with a pod's number within an indexed job."""


def render(spec: JobSpec) -> common.Manifests:
    """Raises InputError for ranks on several pods: a job does not restart them together."""
    if spec.nodes > 1 and spec.stage != "shard":
        problem = f"{spec.nodes} pods of {spec.stage} need a job that keeps them together"
        raise InputError(problem, field="launch.backend", got="job")
    alone = [pod.value("PET_NNODES", 1), pod.value("PET_NODE_RANK", 0)] if spec.accelerated else []
    body = {
        **common.keep_seconds(spec),
        "activeDeadlineSeconds": spec.time_limit_seconds,
        "backoffLimit": spec.cluster.restarts,
        **indexed(spec.nodes),
        "podFailurePolicy": {"rules": [bad_input(CONTAINER), disrupted("Ignore"), preempted(CONTAINER, "Ignore")]},
        "template": pod.pod_template(spec, CONTAINER, environment=alone, restart="Never"),
    }
    return common.Manifests(common.job(spec, "job", body), (common.network_policy(spec),))


def indexed(pods: int) -> dict[str, Any]:
    """Pods with numbers, all at once."""
    return {"completionMode": "Indexed", "completions": pods, "parallelism": pods}


def disrupted(action: str) -> dict[str, Any]:
    """The rule for pods that were taken away: preempted, drained, their node gone."""
    return {"action": action, "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}


def bad_input(container: str) -> dict[str, Any]:
    """The rule of a job's podFailurePolicy for an end that a restart cannot change."""
    return _exits(container, "FailJob", int(ExitCode.BAD_INPUT))


def preempted(container: str, action: str) -> dict[str, Any]:
    """The rule for pods that saved and ended on request."""
    return _exits(container, action, int(ExitCode.PREEMPTED))


def _exits(container: str, action: str, code: int) -> dict[str, Any]:
    return {"action": action, "onExitCodes": {"containerName": container, "operator": "In", "values": [code]}}
