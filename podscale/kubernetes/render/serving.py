"""Servers of a run's model: a Deployment of `podscale serve`, or an InferenceService of KServe.

The Deployment comes with a Service, an autoscaler, and its policies. The InferenceService
(serving.kserve.io/v1beta1) serves the exported ONNX file from a model repository.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from podscale.config import RunConfig
from podscale.errors import InputError
from podscale.kubernetes.job_spec import METRICS_PORT, VERSION_ANNOTATION, JobSpec
from podscale.kubernetes.pod_resources import Amount
from podscale.kubernetes.predict_job import build_model_spec
from podscale.kubernetes.render import common, pod, pod_placement
from podscale.kubernetes.render.common import Manifest
from podscale.runs import RunDirectory
from podscale.util.locations import Location
from podscale.version import VERSION

HTTP_PORT = 8080
"""Port of the predictions in the pods; the Service has port 80."""
CPUS, MEMORY_GIB = 2.0, 4.0
"""Cores and memory of a pod without accelerators, unless the document names its resources."""
DRAIN_SECONDS = 5
"""Time after SIGTERM in which the Service still sends requests, because its endpoints change later, seconds."""
GRACE_SECONDS = 30
"""Time after that for accepted requests, seconds."""
KILL_MARGIN_SECONDS = 10
CPU_UTILIZATION = 70
"""Mean CPU use of the pods above which the autoscaler adds one, percent of their request."""
STARTUP_SECONDS = 300
"""Time for a pod to import its libraries and to listen, seconds."""
DEPLOYMENT_MODE = "serving.kserve.io/deploymentMode"
"""Annotation with KServe's mode; RawDeployment needs no Knative."""
ONNX_VERSION = "1"
"""Version of the format `onnx` in KServe's runtimes."""


@dataclass(frozen=True, kw_only=True)
class ServingOptions:
    """Options of the rendered server.

    Args:
        model: path in the pods, or URL, of a run or model directory; None: the run's directory in its workspace.
        replicas: pods; with an autoscaler, the fewest.
        max_replicas: most pods; None or `replicas`: no autoscaler.
        serving_runtime: name of KServe's runtime; None: KServe chooses one by the model's format.
    """

    model: str | None = None
    replicas: int = 1
    max_replicas: int | None = None
    serving_runtime: str | None = None

    def __post_init__(self) -> None:
        """Raise InputError if the numbers of pods are out of range."""
        if self.replicas < 1:
            raise InputError("must be at least 1", field="--replicas", got=self.replicas)
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            hint = f"Choose at least {self.replicas}, the number of --replicas."
            raise InputError("fewer than --replicas", field="--max-replicas", got=self.max_replicas, hint=hint)

    @property
    def most_replicas(self) -> int:
        return self.max_replicas or self.replicas


@dataclass(frozen=True)
class ServingSpec:
    """Server of a run: its pods, its options, and the path in the pods, or URL, of its model."""

    pods: JobSpec
    options: ServingOptions
    model: str

    @property
    def reads_workspace(self) -> bool:
        """True if the model is in the workspace volume, not behind a URL."""
        return not Location.parse(self.model).is_remote

    def metadata(self, annotations: Mapping[str, str] | None = None) -> Manifest:
        """Return the metadata of an object of this server."""
        return common.object_metadata(self.pods, self.pods.labels, annotations)


def build_serving_spec(config: RunConfig, options: ServingOptions) -> ServingSpec:
    """Return the server of a run. Raises InputError if its hardware cannot serve or the document contradicts itself."""
    spec = build_model_spec(config)
    resources = spec.resources
    if spec.hardware.kind == "cpu":
        cpus = config.launch.resources.cpus or CPUS
        memory = config.launch.resources.memory_gib or MEMORY_GIB
        resources = replace(resources, cpus=cpus, memory_gib=memory, request=Amount(cpus, memory))
    cluster = spec.cluster.model_copy(update={"metrics_tls_secret": None, "metrics_token_secret": None})
    pods = replace(spec, stage="serve", resources=resources, cluster=cluster)
    return ServingSpec(pods, options, options.model or str(RunDirectory.for_config(config).path))


def render_deployment(spec: ServingSpec) -> list[Manifest]:
    """Return the Deployment and its objects, in order of creation."""
    options = spec.options
    is_scaled = options.most_replicas > options.replicas
    clients = {"from": [{"podSelector": {}}], "ports": [{"port": HTTP_PORT, "protocol": "TCP"}]}
    policy = common.network_policy(spec.pods, clients)
    objects = [policy, _disruption_budget(spec), _service(spec), _deployment(spec, is_scaled)]
    return [*objects, _autoscaler(spec)] if is_scaled else objects


def _deployment(spec: ServingSpec, is_scaled: bool) -> Manifest:
    """Return the Deployment; its number of pods is the autoscaler's if there is one."""
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": spec.metadata({VERSION_ANNOTATION: VERSION, **spec.pods.cluster.annotations}),
        "spec": {
            **({} if is_scaled else {"replicas": spec.options.replicas}),
            "selector": {"matchLabels": spec.pods.selector},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
            "template": {
                "metadata": {
                    "labels": spec.pods.labels,
                    "annotations": {**pod.volume_annotations(spec.pods), **spec.pods.cluster.annotations},
                },
                "spec": _pod(spec),
            },
        },
    }


def _pod(spec: ServingSpec) -> Manifest:
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": DRAIN_SECONDS + GRACE_SECONDS + KILL_MARGIN_SECONDS,
        "securityContext": pod.pod_security(spec.pods),
        **pod_placement.pod_placement(spec.pods),
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": spec.pods.selector},
            }
        ],
        "containers": [_container(spec)],
        "volumes": [volume for volume in pod.pod_volumes(spec.pods) if _is_used(spec, volume)],
    }


def _container(spec: ServingSpec) -> Manifest:
    cluster = spec.pods.cluster
    gpu = {"LD_LIBRARY_PATH": pod.NVIDIA_LIBRARIES} if spec.pods.hardware.kind == "gpu" else {}
    variables = {"HOME": pod.TEMPORARY_PATH, **gpu, **cluster.env}
    ports = {"http": HTTP_PORT, "metrics": METRICS_PORT}
    return {
        "name": "serve",
        "image": spec.pods.image,
        **({"imagePullPolicy": cluster.image_pull_policy} if cluster.image_pull_policy else {}),
        "command": _command(spec),
        "env": [pod.value_variable(name, value) for name, value in variables.items()],
        "resources": pod.container_resources(spec.pods),
        "ports": [{"name": name, "containerPort": port, "protocol": "TCP"} for name, port in ports.items()],
        "startupProbe": {**_probe("/livez", 2), "failureThreshold": STARTUP_SECONDS // 2},
        "readinessProbe": {**_probe("/healthz", 2), "failureThreshold": 1},
        "livenessProbe": {**_probe("/livez", 10), "timeoutSeconds": 5, "failureThreshold": 3},
        "securityContext": pod.container_security(spec.pods),
        "volumeMounts": [
            {**mount, "readOnly": True} if mount["name"] == "workspace" else mount
            for mount in pod.container_mounts(spec.pods)
            if _is_used(spec, mount)
        ],
    }


def _command(spec: ServingSpec) -> list[str]:
    processes = spec.pods.resources.accelerators
    return [
        *("podscale", "serve", spec.model),
        *("--host", "0.0.0.0", "--port", str(HTTP_PORT), "--metrics-port", str(METRICS_PORT)),
        *(("--processes", str(processes)) if processes > 1 else ()),
        *("--drain-seconds", str(DRAIN_SECONDS), "--grace-seconds", str(GRACE_SECONDS)),
    ]


def _is_used(spec: ServingSpec, volume: Manifest) -> bool:
    """Return True for a volume or mount that the server needs; a model behind a URL needs no workspace."""
    return volume["name"] != "workspace" or spec.reads_workspace


def _probe(path: str, period: int) -> Manifest:
    return {"httpGet": {"path": path, "port": "metrics"}, "periodSeconds": period, "timeoutSeconds": 2}


def _service(spec: ServingSpec) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": spec.metadata(),
        "spec": {
            "type": "ClusterIP",
            "selector": spec.pods.selector,
            "ports": [{"name": "http", "port": 80, "targetPort": "http", "protocol": "TCP", "appProtocol": "http"}],
        },
    }


def _autoscaler(spec: ServingSpec) -> Manifest:
    """Return the autoscaler: by CPU use, which it knows without an adapter for other metrics."""
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": spec.metadata(),
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": spec.pods.name},
            "minReplicas": spec.options.replicas,
            "maxReplicas": spec.options.most_replicas,
            "metrics": [
                {
                    "type": "Resource",
                    "resource": {
                        "name": "cpu",
                        "target": {"type": "Utilization", "averageUtilization": CPU_UTILIZATION},
                    },
                }
            ],
        },
    }


def _disruption_budget(spec: ServingSpec) -> Manifest:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": spec.metadata(),
        "spec": {
            "maxUnavailable": 1,
            "selector": {"matchLabels": spec.pods.selector},
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }


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
