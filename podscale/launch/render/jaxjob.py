"""JAXJob of the Kubeflow training operator, v1.

The operator tells the pods where the coordinator is (COORDINATOR_ADDRESS, COORDINATOR_PORT, NUM_PROCESSES, PROCESS_ID),
which is enough for torchrun too. On GKE it tells them nothing about TPUs: slices of several machines are for JobSet.
"""

from podscale.errors import InputError
from podscale.launch.backends import BACKENDS
from podscale.launch.jobspec import JobSpec
from podscale.launch.render import common, pod
from podscale.launch.render.pytorchjob import run_policy

PORT = 6666
"""The operator's own; it must be named jaxjob-port."""


def render(spec: JobSpec) -> common.Manifests:
    """Raises InputError for TPU slices of several machines and for elastic jobs."""
    common.refuse_elastic(spec, "jaxjob")
    if spec.hardware.hosts > 1:
        raise InputError(
            f"the training operator does not tell the {spec.nodes} machines of {spec.hardware.name} about their slice",
            field="launch.backend",
            got="jaxjob",
            hint="Set launch.backend=jobset",
        )
    template = pod.pod_template(spec, BACKENDS["jaxjob"].container, ports={"jaxjob-port": PORT})
    worker = {"replicas": spec.nodes, "restartPolicy": "OnFailure", "template": template}
    body = {"runPolicy": run_policy(spec), "jaxReplicaSpecs": {"Worker": worker}}
    return common.Manifests(common.job(spec, "jaxjob", body), (common.network_policy(spec),))
