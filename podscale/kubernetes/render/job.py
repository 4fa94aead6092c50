"""Kubernetes Job: for stages of one pod, and for shards and predictions, whose pods work independently."""

from typing import Any

from podscale.errors import ExitCode, InputError
from podscale.kubernetes.job_spec import JobSpec
from podscale.kubernetes.render import common, pod
from podscale.kubernetes.resources import STAGE_CONTAINERS

JOB_CONTAINER = STAGE_CONTAINERS["job"]
COMPLETION_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
"""Field with a pod's number within an indexed job."""


def render_plain_job(spec: JobSpec) -> common.JobManifests:
    """Return a plain Job. Raises InputError for ranks on several pods, because a Job does not restart them together."""
    if spec.nodes > 1 and spec.stage != "shard":
        problem = f"{spec.nodes} pods of {spec.stage} need a job that restarts them together"
        raise InputError(problem, field="launch.backend", got="job")
    rendezvous = {"PET_NNODES": 1, "PET_NODE_RANK": 0} if spec.stage in ("train", "evaluate") else {}
    environment = [pod.value_variable(name, value) for name, value in rendezvous.items()]
    body = {
        **common.ttl_after_finished(spec),
        "activeDeadlineSeconds": spec.time_limit_seconds,
        **_completion(spec),
        "podFailurePolicy": {
            "rules": [
                bad_input_rule(JOB_CONTAINER),
                disruption_rule("Ignore"),
                preemption_rule(JOB_CONTAINER, "Ignore"),
            ]
        },
        "template": pod.pod_template(spec, JOB_CONTAINER, environment=environment, restart="Never"),
    }
    return common.JobManifests(common.job_object(spec, "job", body), (common.network_policy(spec),))


def _completion(spec: JobSpec) -> dict[str, Any]:
    """Return the fields for the number of pods and their failures; each part of a prediction has its own limit."""
    if spec.parts:
        completion = {"completionMode": "Indexed", "completions": spec.parts, "parallelism": spec.pods}
        return {"backoffLimitPerIndex": spec.cluster.restarts, **completion}
    return {"backoffLimit": spec.cluster.restarts, **indexed_completion(spec.nodes)}


def indexed_completion(pods: int) -> dict[str, Any]:
    """Return the fields for numbered pods that run at the same time."""
    return {"completionMode": "Indexed", "completions": pods, "parallelism": pods}


def disruption_rule(action: str) -> dict[str, Any]:
    """Return the rule for disrupted pods: preempted, drained, or on a lost node."""
    return {"action": action, "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}


def bad_input_rule(container: str) -> dict[str, Any]:
    """Return the rule for bad input, which a restart cannot fix."""
    return _exit_code_rule(container, "FailJob", int(ExitCode.BAD_INPUT))


def preemption_rule(container: str, action: str) -> dict[str, Any]:
    """Return the rule for pods that saved and exited on request."""
    return _exit_code_rule(container, action, int(ExitCode.PREEMPTED))


def _exit_code_rule(container: str, action: str, code: int) -> dict[str, Any]:
    return {"action": action, "onExitCodes": {"containerName": container, "operator": "In", "values": [code]}}
