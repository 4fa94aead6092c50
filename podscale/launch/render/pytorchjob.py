"""PyTorchJob of the Kubeflow training operator, v1.

All pods are workers. With a master the operator gives every worker an init container without a security context, which
a namespace with restricted Pod Security refuses (training-operator 1.9.4, pkg/controller.v1/pytorch/initcontainer.go);
without one it tells the workers how many they are, but not where to meet. So the pods are told here: their rank by the
label that the operator gives each, the first worker as the meeting place, for which the operator makes a headless
service. The job succeeds when all pods have.

With launch.cluster.min_nodes the job is elastic: torchrun's c10d rendezvous decides who is which rank, and goes on with
fewer pods.
"""

from typing import Any

from podscale.launch.backends import BACKENDS
from podscale.launch.jobspec import JobSpec
from podscale.launch.render import common, pod

PORT = 23456
"""The operator's own; it must be named pytorchjob-port."""
JOIN_SECONDS = 900
"""How long pods wait for each other at an elastic rendezvous: images are pulled and nodes created meanwhile."""


def render(spec: JobSpec) -> common.Manifests:
    body: dict[str, Any] = {"runPolicy": run_policy(spec), "nprocPerNode": str(spec.processes)}
    if spec.min_nodes is not None:
        body["elasticPolicy"] = _elastic(spec, spec.min_nodes)
    ports = {"pytorchjob-port": PORT}
    environment = [] if spec.min_nodes is not None else _meeting(spec)
    template = pod.pod_template(spec, BACKENDS["pytorchjob"].container, environment=environment, ports=ports)
    body["pytorchReplicaSpecs"] = {
        "Worker": {"replicas": spec.nodes, "restartPolicy": "OnFailure", "template": template}
    }
    return common.Manifests(common.job(spec, "pytorchjob", body), (common.network_policy(spec),))


def run_policy(spec: JobSpec) -> dict[str, Any]:
    """What the training operator does about the job as a whole.

    It counts the restarts of all containers together, and after one loss every pod restarts. A count that reaches a
    limit above 0 fails the job (pkg/core/job.go, PastBackoffLimit), so the limit is one more than the restarts that are
    allowed. Pods that still run when the job has ended are removed.
    """
    allowed = spec.cluster.restarts * spec.nodes
    return {
        "cleanPodPolicy": "Running",
        "backoffLimit": allowed + 1 if allowed else 0,
        "activeDeadlineSeconds": spec.time_limit_seconds,
        **common.keep_seconds(spec),
    }


def _meeting(spec: JobSpec) -> list[dict[str, Any]]:
    """Where the pods meet, and which of them this is. Their number and that of their ranks the operator tells."""
    return [
        pod.field("PET_NODE_RANK", "metadata.labels['training.kubeflow.org/replica-index']"),
        pod.value("PET_MASTER_ADDR", f"{spec.name}-worker-0"),
        pod.value("PET_MASTER_PORT", PORT),
    ]


def _elastic(spec: JobSpec, least: int) -> dict[str, Any]:
    """No metrics here: with them the operator would scale the job, and its own SDK could not read it back."""
    waits = {"join_timeout": JOIN_SECONDS, "read_timeout": JOIN_SECONDS}
    return {
        "minReplicas": least,
        "maxReplicas": spec.nodes,
        "maxRestarts": spec.max_restarts,
        "rdzvBackend": "c10d",
        "rdzvId": spec.run,
        "rdzvConf": [{"key": key, "value": str(value)} for key, value in waits.items()],
    }
