"""TrainJob of Kubeflow Trainer v2, with its own TrainingRuntime.

The runtime has the template of the pods and the failure policy, most of which a TrainJob may not patch. The TrainJob
has the command, the number of nodes, and in its runtimePatches the placement of the pods. Trainer 2.3 does not support
elastic jobs and does not delete finished jobs.
"""

from typing import Any

from podscale.errors import InputError
from podscale.kubernetes.job_spec import JobSpec
from podscale.kubernetes.render import common, jobset, pod
from podscale.kubernetes.resources import JOB_KINDS, STAGE_CONTAINERS

TRAINJOB_CONTAINER = STAGE_CONTAINERS["trainjob"]
ANCESTOR_LABEL = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
PATCHED_FIELDS = ("serviceAccountName", "imagePullSecrets", "nodeSelector", "tolerations")
"""Fields of a pod's spec that a TrainJob may patch."""
PATCH_MANAGER = "podscale.dev/render"


def render_trainjob(spec: JobSpec) -> common.JobManifests:
    """Return the TrainJob and its runtime. Raises InputError for elastic jobs and several TPU slices."""
    common.check_not_elastic(spec, "trainjob")
    if spec.slices > 1:
        hint = "Set launch.backend=jobset"
        raise InputError("Trainer does not support several slices", field="launch.backend", got="trainjob", hint=hint)
    template = pod.pod_template(spec, TRAINJOB_CONTAINER, restart="Never")
    (container,) = template["spec"]["containers"]
    trainer = {
        "image": container["image"],
        "command": container.pop("command"),
        "env": container.pop("env"),
        "numNodes": spec.nodes,
        "numProcPerNode": spec.processes_per_node,
        "resourcesPerNode": container.pop("resources"),
    }
    patch = {name: template["spec"].pop(name) for name in PATCHED_FIELDS if name in template["spec"]}
    body = {
        "runtimeRef": {"apiGroup": JOB_KINDS["trainjob"].group, "kind": "TrainingRuntime", "name": spec.name},
        "activeDeadlineSeconds": spec.time_limit_seconds,
        "trainer": trainer,
        "runtimePatches": [{"manager": PATCH_MANAGER, "trainingRuntimeSpec": _runtime_patch(patch)}],
    }
    owned_objects = (common.network_policy(spec), _training_runtime(spec, template))
    return common.JobManifests(common.job_object(spec, "trainjob", body), owned_objects)


def _training_runtime(spec: JobSpec, template: dict[str, Any]) -> common.Manifest:
    annotations = jobset.EXCLUSIVE_TOPOLOGY if spec.hardware.hosts > 1 else {}
    metadata = {"metadata": {"annotations": annotations}} if annotations else {}
    return {
        "apiVersion": JOB_KINDS["trainjob"].api_version,
        "kind": "TrainingRuntime",
        "metadata": common.object_metadata(spec, {**spec.labels, "trainer.kubeflow.org/framework": "torch"}),
        "spec": {
            "mlPolicy": {"numNodes": spec.nodes, "torch": {}},
            "template": {
                **metadata,
                "spec": jobset.jobset_spec(spec, TRAINJOB_CONTAINER, template, None, labels=ANCESTOR_LABEL),
            },
        },
    }


def _runtime_patch(fields: dict[str, Any]) -> dict[str, Any]:
    patched = {"name": jobset.REPLICATED_JOB, "template": {"spec": {"template": {"spec": fields}}}}
    return {"template": {"spec": {"replicatedJobs": [patched]}}}
