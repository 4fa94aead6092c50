"""JobSet: one job for each TPU slice, or one job for all pods without slices.

After any loss all pods restart from the newest checkpoint. Bad input and the time limit fail the JobSet. Disrupted
pods, and pods that saved and exited on request, do not count as restarts. Every restart creates new jobs and resets the
time limit.
"""

from typing import Any

from podscale.kubernetes.job_spec import JobSpec
from podscale.kubernetes.render import common, job, pod
from podscale.kubernetes.resources import STAGE_CONTAINERS
from podscale.util import env

JOBSET_CONTAINER = STAGE_CONTAINERS["jobset"]
REPLICATED_JOB = "node"
TORCHRUN_PORT = 29500
"""Default port of torchrun's rendezvous."""
EXCLUSIVE_TOPOLOGY = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
"""One job for each node pool of GKE, which is a slice."""


def render_jobset(spec: JobSpec) -> common.JobManifests:
    """Return the JobSet of a stage. Raises InputError for elastic jobs."""
    common.check_not_elastic(spec, "jobset")
    annotations = EXCLUSIVE_TOPOLOGY if spec.hardware.hosts > 1 else {}
    environment = [*_rendezvous_variables(spec), *_slice_variables(spec)]
    template = pod.pod_template(
        spec, JOBSET_CONTAINER, environment=environment, ports={"rendezvous": TORCHRUN_PORT}, restart="Never"
    )
    body = jobset_spec(spec, JOBSET_CONTAINER, template, spec.nodes // spec.slices, spec.slices)
    body = {**common.ttl_after_finished(spec), **body}
    return common.JobManifests(common.job_object(spec, "jobset", body, annotations), (common.network_policy(spec),))


def jobset_spec(
    spec: JobSpec,
    container: str,
    template: dict[str, Any],
    pods: int | None,
    replicas: int = 1,
    labels: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Return the spec of a JobSet.

    Args:
        pods: pods of each job; None if another controller sets it.
        replicas: number of jobs.
        labels: labels of the jobs, for that controller.
    """
    rules = [job.bad_input_rule(container), job.disruption_rule("FailJob"), job.preemption_rule(container, "FailJob")]
    child = {
        "backoffLimit": 0,
        "activeDeadlineSeconds": spec.time_limit_seconds,
        **(job.indexed_completion(pods) if pods is not None else {}),
        "podFailurePolicy": {"rules": rules},
        "template": template,
    }
    metadata = {"metadata": {"labels": labels}} if labels else {}
    return {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": failure_policy(spec),
        "replicatedJobs": [{"name": REPLICATED_JOB, "replicas": replicas, "template": {**metadata, "spec": child}}],
    }


def failure_policy(spec: JobSpec) -> dict[str, Any]:
    """Return the policy for a failed job; the JobSet restarts if no rule matches.

    The message is matched, because nothing else shows which rule of the podFailurePolicy applied.
    """
    return {
        "maxRestarts": spec.cluster.restarts,
        "rules": [
            {"name": "tooLong", "action": "FailJobSet", "onJobFailureReasons": ["DeadlineExceeded"]},
            {
                "name": "badInput",
                "action": "FailJobSet",
                "onJobFailureReasons": ["PodFailurePolicy"],
                "onJobFailureMessagePatterns": [".*matching FailJob rule at index 0.*"],
            },
            {
                "name": "takenAway",
                "action": "RestartJobSetAndIgnoreMaxRestarts",
                "onJobFailureReasons": ["PodFailurePolicy"],
            },
        ],
    }


def _rendezvous_variables(spec: JobSpec) -> list[dict[str, Any]]:
    """Return torchrun's variables; the first pod of the first job is the rendezvous."""
    return [
        pod.value_variable("PET_NNODES", spec.nodes),
        pod.value_variable("PET_NPROC_PER_NODE", spec.processes_per_node),
        pod.field_variable("PET_NODE_RANK", job.COMPLETION_INDEX),
        pod.value_variable("PET_MASTER_ADDR", f"{spec.name}-{REPLICATED_JOB}-0-0.{spec.name}"),
        pod.value_variable("PET_MASTER_PORT", TORCHRUN_PORT),
    ]


def _slice_variables(spec: JobSpec) -> list[dict[str, Any]]:
    """Return the variables with a pod's slice and the size of a slice, because the pod's index is within its slice."""
    if spec.slices == 1:
        return []
    return [
        pod.field_variable(env.SLICE, "metadata.labels['jobset.sigs.k8s.io/job-index']"),
        pod.value_variable(env.SLICE_NODES, spec.nodes // spec.slices),
    ]
