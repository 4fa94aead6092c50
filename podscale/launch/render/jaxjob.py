"""JAXJob of the Kubeflow training operator, v1, from the typed models of kubeflow-training.

The operator sets the coordinator's address in every pod (COORDINATOR_ADDRESS, COORDINATOR_PORT, NUM_PROCESSES,
PROCESS_ID), which is enough for torchrun too. On GKE it sets nothing about TPUs: slices of several machines are for
JobSet.
"""

from podscale.errors import InputError
from podscale.launch.backends import JOB_BACKENDS
from podscale.launch.jobspec import JobSpec
from podscale.launch.render import common, pod
from podscale.launch.render.pytorchjob import as_manifest, run_policy_spec, worker

JAXJOB_PORT = 6666
"""The operator's own; it must be named jaxjob-port."""


def render_jaxjob(spec: JobSpec) -> common.JobManifests:
    """Return the JAXJob of a stage, and its network policy.

    Raises InputError for TPU slices of several machines and for elastic jobs.
    """
    from kubeflow.training import models  # 0.4 s: it imports every model of kubernetes

    common.check_not_elastic(spec, "jaxjob")
    if spec.hardware.hosts > 1:
        raise InputError(
            f"the training operator does not tell the {spec.nodes} machines of {spec.hardware.name} about their slice",
            field="launch.backend",
            got="jaxjob",
            hint="Set launch.backend=jobset",
        )
    template = pod.pod_template(spec, JOB_BACKENDS["jaxjob"].container, ports={"jaxjob-port": JAXJOB_PORT})
    body = models.KubeflowOrgV1JAXJobSpec(
        run_policy=run_policy_spec(spec), jax_replica_specs={"Worker": worker(spec, template)}
    )
    return common.JobManifests(common.job_object(spec, "jaxjob", as_manifest(body)), (common.network_policy(spec),))
