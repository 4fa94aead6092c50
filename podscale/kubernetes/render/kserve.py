"""KServe InferenceService (serving.kserve.io/v1beta1) for the exported ONNX file of a run."""

from typing import Any

from podscale.errors import InputError
from podscale.kubernetes.render import pod, pod_placement
from podscale.kubernetes.render.common import Manifest
from podscale.kubernetes.render.serving import CPU_UTILIZATION, ServingSpec
from podscale.util.locations import Location

DEPLOYMENT_MODE = "serving.kserve.io/deploymentMode"
"""Annotation with KServe's mode; RawDeployment needs no Knative."""
ONNX_VERSION = "1"
"""Version of the format `onnx` in KServe's runtimes."""


def render_inference_service(spec: ServingSpec) -> list[Manifest]:
    """Return the InferenceService. Raises InputError if no model repository is named, or it cannot be mounted."""
    options = spec.options
    model: dict[str, Any] = {
        "modelFormat": {"name": "onnx", "version": ONNX_VERSION},
        "protocolVersion": "v2",
        **({"runtime": options.serving_runtime} if options.serving_runtime is not None else {}),
        "storageUri": _storage_uri(spec),
        "resources": pod.container_resources(spec.pods),
        "securityContext": pod.restricted_container_security() | {"readOnlyRootFilesystem": False},
    }
    predictor = {
        "minReplicas": options.replicas,
        "maxReplicas": options.most_replicas,
        "scaleMetric": "cpu",
        "scaleTarget": CPU_UTILIZATION,
        "automountServiceAccountToken": False,
        "securityContext": pod.restricted_pod_security(),
        **pod_placement.pod_placement(spec.pods),
        "model": model,
    }
    annotations = {DEPLOYMENT_MODE: "RawDeployment", **spec.pods.cluster.annotations}
    return [
        {
            "apiVersion": "serving.kserve.io/v1beta1",
            "kind": "InferenceService",
            "metadata": spec.metadata(annotations),
            "spec": {"predictor": predictor},
        }
    ]


def _storage_uri(spec: ServingSpec) -> str:
    """Return the URL that KServe's storage initializer copies; a path is that of a volume claim."""
    model = spec.options.model
    if model is None:
        hint = f"Name a folder or URL with {spec.pods.run}/1/model.onnx, as `podscale export --repository` writes it."
        raise InputError("KServe's runtimes read a model repository", field="--model", hint=hint)
    if Location.parse(model).is_remote:
        return model
    claim, workspace = spec.pods.cluster.workspace_claim, spec.pods.workspace.rstrip("/")
    if claim is None or not model.startswith(f"{workspace}/"):
        hint = "Name a URL such as gs://bucket/models, or a directory below run.workspace."
        problem = "not in the workspace claim, from which KServe copies it"
        raise InputError(problem, field="--model", got=model, hint=hint)
    return f"pvc://{claim}/{model.removeprefix(f'{workspace}/')}"
