"""Pod settings of pipeline tasks: image, resources, nodes and volumes, as far as KFP supports them.

The pod is rendered as for `podscale submit` (podscale.kubernetes.render) and translated to kfp-kubernetes calls. A task
that launches a job and waits gets the report's pod, which needs no accelerator, with a small image and small resources.
KFP sets the service account and the rest of the security context.
"""

from collections.abc import Mapping
from typing import Any

from podscale.config import RunConfig
from podscale.errors import InputError
from podscale.kubernetes.job_spec import build_job_spec, pod_telemetry
from podscale.kubernetes.render import render_job
from podscale.pipelines.training_pipeline import LAUNCHER_ROLES, PlaceTask, TaskRole
from podscale.runs.stage_outcomes import StageName
from podscale.stages.local import ExportedTelemetry
from podscale.util import env

STAGE_OF_ROLE: Mapping[TaskRole, StageName] = {
    "configure": "report",
    "shard": "shard",
    "train": "train",
    "evaluate": "evaluate",
    "report": "report",
    "export": "report",
    "launcher": "report",
    "summary": "report",
}
"""Stage whose pod each role uses."""
LAUNCHER_RESOURCES = {"requests": {"cpu": "250m", "memory": "512Mi"}, "limits": {"cpu": "1", "memory": "1Gi"}}
"""Resources of a pod that waits for a job; the client and kfp take about 200 MiB."""
RESERVED_VARIABLES = (env.RUN_DOCUMENT, env.JOB_START)
"""Variables of a job's pod that a component receives as inputs instead, or does not need."""
UNRETRIED_ROLES: tuple[TaskRole, ...] = ("configure", "summary")
"""Roles that do no long work: an invalid parameter is to be reported at once."""
BACKOFF_SECONDS = 60


def task_placer(config: RunConfig, *, security: bool = True) -> PlaceTask:
    """Return a function that sets image, resources and node of each task by the run document.

    It raises InputError if KFP's tasks do not support a setting. With `security` pods run as a user, not as root; KFP
    2.15 lacks the setting.
    """

    def place(task: Any, role: TaskRole) -> None:
        pod = _role_pod_template(config, role)
        _set_container(task, pod["spec"]["containers"][0])
        _set_kubernetes_options(task, pod)
        if security:
            _set_user(task, pod["spec"])
        if role == "shard":
            _set_sharding_variables(task, config)
        _set_limits(task, config, retries=0 if role in UNRETRIED_ROLES else config.launch.retries)

    return place


def _role_pod_template(config: RunConfig, role: TaskRole) -> dict[str, Any]:
    spec = build_job_spec(config, STAGE_OF_ROLE[role], mounted=False)
    if spec.nodes > 1 and spec.stage in ("train", "evaluate"):
        raise InputError(
            f"the {spec.stage} task would do its work in its own pod, but this document requests {spec.nodes} pods",
            field="launch.backend",
            got=config.launch.backend,
            hint="Set launch.backend=auto: the task then submits a job with that many pods, and waits for it.",
        )
    job = render_job(spec, "job").job
    pod: dict[str, Any] = job["spec"]["template"]
    if role in LAUNCHER_ROLES:
        container = pod["spec"]["containers"][0]
        container.update(image=config.launch.launcher_image, resources=LAUNCHER_RESOURCES)
        pod["metadata"]["labels"]["app.kubernetes.io/component"] = "launcher"
    for name in spec.selector:  # the run is a parameter, and these labels select pods of jobs
        pod["metadata"]["labels"].pop(name, None)
    return pod


def _set_container(task: Any, container: Mapping[str, Any]) -> None:
    task.set_container_image(container["image"])
    resources = container.get("resources", {})
    requests, limits = resources.get("requests", {}), resources.get("limits", {})
    for name in ("cpu", "memory"):
        if name in requests:
            getattr(task, f"set_{name}_request")(requests[name])
        if name in limits:
            getattr(task, f"set_{name}_limit")(limits[name])
    for name, amount in limits.items():
        if "/" in name:  # an extended resource, such as nvidia.com/gpu
            task.set_accelerator_type(name).set_accelerator_limit(int(amount))
    for variable in container.get("env", ()):
        if "value" in variable and variable["name"] not in RESERVED_VARIABLES:
            task.set_env_variable(variable["name"], variable["value"])


def _set_sharding_variables(task: Any, config: RunConfig) -> None:
    """Set options that do not affect the shards as variables, because those are not part of the cache key."""
    if config.launch.shard_workers:
        task.set_env_variable(env.SHARD_WORKERS, str(config.launch.shard_workers))
    if config.telemetry.enabled:
        for name, value in ExportedTelemetry(config.run.id, pod_telemetry(config)).variables.items():
            task.set_env_variable(name, value)


def _set_kubernetes_options(task: Any, pod: Mapping[str, Any]) -> None:
    """Set nodes, volumes, labels and image pulling."""
    from kfp import kubernetes  # loads the whole Kubernetes client, about a second, which local runs do not need

    metadata, spec = pod.get("metadata", {}), pod["spec"]
    for key, value in spec.get("nodeSelector", {}).items():
        kubernetes.add_node_selector(task, key, value)
    for taint in spec.get("tolerations", ()):
        seconds = taint.get("tolerationSeconds")
        kubernetes.add_toleration(
            task, taint.get("key"), taint.get("operator"), taint.get("value"), taint.get("effect"), seconds
        )
    for key, value in metadata.get("labels", {}).items():
        kubernetes.add_pod_label(task, key, value)
    for key, value in metadata.get("annotations", {}).items():
        kubernetes.add_pod_annotation(task, key, value)
    if secrets := [secret["name"] for secret in spec.get("imagePullSecrets", ())]:
        kubernetes.set_image_pull_secrets(task, secrets)
    if policy := spec["containers"][0].get("imagePullPolicy"):
        kubernetes.set_image_pull_policy(task, policy)
    volumes = {volume["name"]: volume for volume in spec.get("volumes", ())}
    for mount in spec["containers"][0].get("volumeMounts", ()):
        _mount_volume(task, volumes[mount["name"]], mount)


def _mount_volume(task: Any, volume: Mapping[str, Any], mount: Mapping[str, Any]) -> None:
    """Mount a volume. Raises InputError for a kind that KFP's tasks do not support.

    The pod's own annotations are left out, because no launcher annotates the pod of a task.
    """
    if "downwardAPI" in volume:
        return
    from kfp import kubernetes

    path = mount["mountPath"]
    if claim := volume.get("persistentVolumeClaim"):
        kubernetes.mount_pvc(task, claim["claimName"], path, mount.get("subPath", ""))
    elif (empty := volume.get("emptyDir")) is not None:
        kubernetes.empty_dir_mount(task, volume["name"], path, empty.get("medium"), empty.get("sizeLimit"))
    elif secret := volume.get("secret"):
        kubernetes.use_secret_as_volume(task, secret["secretName"], path)
    elif config_map := volume.get("configMap"):
        kubernetes.use_config_map_as_volume(task, config_map["name"], path)
    else:
        kind = next(key for key in volume if key != "name")
        raise InputError(
            f"KFP tasks cannot mount a volume of kind {kind}",
            field="launch.cluster.volumes",
            got=path,
            hint="Create a PersistentVolume and a claim for it, and name the claim (docs/how-to/kfp.md shows this for "
            "a bucket).",
        )


def _set_user(task: Any, spec: Mapping[str, Any]) -> None:
    from kfp import kubernetes

    context = {**spec.get("securityContext", {}), **spec["containers"][0].get("securityContext", {})}
    if context.get("runAsNonRoot"):
        kubernetes.set_security_context(task, context.get("runAsUser"), context.get("runAsGroup"), run_as_non_root=True)


def _set_limits(task: Any, config: RunConfig, *, retries: int) -> None:
    """Set time limit and retries.

    KFP's backoff_max_duration counts from the first attempt. If it were shorter than the time limit, a stage that fails
    late would never be retried.
    """
    from kfp import kubernetes

    seconds = round(config.launch.time_limit_hours * 3600)
    kubernetes.set_timeout(task, seconds)
    if retries:
        task.set_retry(
            retries, backoff_duration=f"{BACKOFF_SECONDS}s", backoff_factor=2.0, backoff_max_duration=f"{seconds}s"
        )
