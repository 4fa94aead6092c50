"""PyTorchJob and JAXJob of the Kubeflow training operator, v1, from the typed models of kubeflow-training.

The models cover the operator's fields; the pod template in them is the dict that all kinds of job share. So an unknown
field is a TypeError here, before the cluster refuses it.

PyTorchJob: all pods are workers. With a master the operator gives every worker an init container without a security
context, which restricted Pod Security refuses (training-operator 1.9.4, pkg/controller.v1/pytorch/initcontainer.go).
Without a master the operator sets the number of workers, but no rendezvous address, so the pod template sets it: the
rank is in a label that the operator gives each pod, and the address is the headless service of the first worker. The
job succeeds when all its pods have succeeded. With launch.cluster.min_nodes the job is elastic: torchrun's c10d
rendezvous assigns the ranks, and continues with fewer pods.

JAXJob: the operator sets the coordinator's address in every pod (COORDINATOR_ADDRESS, COORDINATOR_PORT, NUM_PROCESSES,
PROCESS_ID), which torchrun can use as well. It does not configure TPUs: slices of several machines need a JobSet.
"""

from typing import Any

from podscale.errors import InputError
from podscale.kubernetes.job_spec import JobSpec
from podscale.kubernetes.render import common, pod
from podscale.kubernetes.resources import STAGE_CONTAINERS

PYTORCHJOB_PORT = 23456
"""The operator's default; its name must be pytorchjob-port."""
JAXJOB_PORT = 6666
"""The operator's default; its name must be jaxjob-port."""
JOIN_SECONDS = 900
"""Timeout of an elastic rendezvous, seconds; long enough to pull images and create nodes."""


def render_pytorchjob(spec: JobSpec) -> common.JobManifests:
    from kubeflow.training import models  # 0.4 s: it imports every model of kubernetes

    elastic = spec.min_nodes is not None
    template = pod.pod_template(
        spec,
        STAGE_CONTAINERS["pytorchjob"],
        environment=[] if elastic else _rendezvous_variables(spec),
        ports={"pytorchjob-port": PYTORCHJOB_PORT},
    )
    body = models.KubeflowOrgV1PyTorchJobSpec(
        run_policy=run_policy_spec(spec),
        nproc_per_node=str(spec.processes_per_node),
        elastic_policy=_elastic_policy(spec) if elastic else None,
        pytorch_replica_specs={"Worker": worker(spec, template)},
    )
    return common.JobManifests(common.job_object(spec, "pytorchjob", as_manifest(body)), (common.network_policy(spec),))


def run_policy_spec(spec: JobSpec) -> Any:
    """Return the operator's policy for the job as a whole (KubeflowOrgV1RunPolicy).

    The operator counts the restarts of all containers, and after one loss every pod restarts. The job fails when the
    count reaches a limit above 0 (pkg/core/job.go, PastBackoffLimit), so the limit is one more than the allowed
    restarts.
    """
    from kubeflow.training import models

    allowed = spec.cluster.restarts * spec.nodes
    return models.KubeflowOrgV1RunPolicy(
        clean_pod_policy="Running",
        backoff_limit=allowed + 1 if allowed else 0,
        active_deadline_seconds=spec.time_limit_seconds,
        ttl_seconds_after_finished=common.ttl_after_finished(spec).get("ttlSecondsAfterFinished"),
    )


def worker(spec: JobSpec, template: dict[str, Any]) -> Any:
    """Return the replicas of a job whose pods are all workers (KubeflowOrgV1ReplicaSpec)."""
    from kubeflow.training import models

    return models.KubeflowOrgV1ReplicaSpec(replicas=spec.nodes, restart_policy="OnFailure", template=template)


def as_manifest(model: Any) -> dict[str, Any]:
    """Return a model of kubeflow-training as JSON values, in the order of its fields."""
    from kubeflow.training import ApiClient

    manifest: dict[str, Any] = ApiClient().sanitize_for_serialization(model)
    return manifest


def _rendezvous_variables(spec: JobSpec) -> list[dict[str, Any]]:
    """Return the rendezvous address and the rank of a pod; the operator sets the number of pods and processes."""
    return [
        pod.field_variable("PET_NODE_RANK", "metadata.labels['training.kubeflow.org/replica-index']"),
        pod.value_variable("PET_MASTER_ADDR", f"{spec.name}-worker-0"),
        pod.value_variable("PET_MASTER_PORT", PYTORCHJOB_PORT),
    ]


def _elastic_policy(spec: JobSpec) -> Any:
    """Return the elastic policy (KubeflowOrgV1ElasticPolicy).

    It has no metrics, because with metrics the operator scales the job, and kubeflow-training cannot read it back.
    """
    from kubeflow.training import models

    timeouts = {"join_timeout": JOIN_SECONDS, "read_timeout": JOIN_SECONDS}
    return models.KubeflowOrgV1ElasticPolicy(
        min_replicas=spec.min_nodes,
        max_replicas=spec.nodes,
        max_restarts=spec.max_restarts,
        rdzv_backend="c10d",
        rdzv_id=spec.run,
        rdzv_conf=[models.KubeflowOrgV1RDZVConf(key=key, value=str(value)) for key, value in timeouts.items()],
    )


def render_jaxjob(spec: JobSpec) -> common.JobManifests:
    """Return the JAXJob of a stage. Raises InputError for TPU slices of several machines and for elastic jobs."""
    from kubeflow.training import models  # 0.4 s: it imports every model of kubernetes

    common.check_not_elastic(spec, "jaxjob")
    if spec.hardware.hosts > 1:
        raise InputError(
            f"the training operator does not configure the slice of {spec.hardware.name} ({spec.nodes} machines)",
            field="launch.backend",
            got="jaxjob",
            hint="Set launch.backend=jobset",
        )
    template = pod.pod_template(spec, STAGE_CONTAINERS["jaxjob"], ports={"jaxjob-port": JAXJOB_PORT})
    body = models.KubeflowOrgV1JAXJobSpec(
        run_policy=run_policy_spec(spec), jax_replica_specs={"Worker": worker(spec, template)}
    )
    return common.JobManifests(common.job_object(spec, "jaxjob", as_manifest(body)), (common.network_policy(spec),))
