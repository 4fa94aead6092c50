"""Pod template of every kind of job: image, command, document, volumes and security.

It meets the `restricted` Pod Security Standard unless the hardware needs more: no root, no capabilities, a read-only
root file system, and no service account token.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from podscale.config.launch import VolumeSection
from podscale.kubernetes import termination_message
from podscale.kubernetes.job_spec import METRICS_PORT, START_ANNOTATION, JobSpec, metrics_secrets
from podscale.kubernetes.render import gpudirect, pod_placement
from podscale.util import env

TEMPORARY_PATH = "/tmp"
SHARED_MEMORY_PATH = "/dev/shm"
USER_ID = 65532
"""uid and gid in our images."""
KILL_MARGIN_SECONDS = 30
"""Time after the ranks' grace period for the supervisor to kill the remaining ranks and report the exit, seconds."""
JAX_PLATFORMS = {"cpu": "cpu", "gpu": "cuda,cpu", "tpu": "tpu,cpu"}
"""JAX_PLATFORMS by hardware, so that JAX fails if accelerators are missing instead of using CPUs."""
POD_INFO_PATH = "/etc/podscale"
"""Mount path of the pod's own annotations."""
JOB_START_FILE = "job-start"
TPU_PORTS = {"tpu": 8471, "tpu-metrics": 8431}
"""libtpu's ports, for the hosts of a slice and for the chips' metrics."""
MEGASCALE_PORT = {"megascale": 8080}
"""Port between slices (GKE's MEGASCALE_COORDINATOR_ADDRESS)."""
NVIDIA_LIBRARIES = "/usr/local/nvidia/lib64"
"""Path at which GKE's device plugin mounts the driver's libraries (written from memory)."""


def gib_quantity(gib: float) -> str:
    return f"{gib:g}Gi" if gib == int(gib) else f"{round(gib * 1024)}Mi"


def pod_volumes(spec: JobSpec) -> list[dict[str, Any]]:
    resources = spec.resources
    volumes: list[dict[str, Any]] = [
        {"name": "tmp", "emptyDir": {"sizeLimit": gib_quantity(resources.temporary_gib)}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": gib_quantity(resources.shm_gib)}},
    ]
    if spec.stage == "train":
        volumes.append({"name": "pod-info", "downwardAPI": {"items": [_annotation_file(START_ANNOTATION)]}})
    if spec.cache_path is not None:
        volumes.append({"name": "cache", "emptyDir": {"sizeLimit": gib_quantity(resources.cache_gib)}})
    if spec.cluster.workspace_claim is not None:
        volumes.append({"name": "workspace", "persistentVolumeClaim": {"claimName": spec.cluster.workspace_claim}})
    volumes += [_secret_volume(mount.name, mount.secret) for mount in metrics_secrets(spec.cluster)]
    return [*volumes, *(_volume_source(spec, f"volume-{n}", volume) for n, volume in enumerate(spec.cluster.volumes))]


def container_mounts(spec: JobSpec) -> list[dict[str, Any]]:
    mounts: list[dict[str, Any]] = [
        {"name": "tmp", "mountPath": TEMPORARY_PATH},
        {"name": "shm", "mountPath": SHARED_MEMORY_PATH},
    ]
    if spec.stage == "train":
        mounts.append({"name": "pod-info", "mountPath": POD_INFO_PATH, "readOnly": True})
    if spec.cache_path is not None:
        mounts.append({"name": "cache", "mountPath": spec.cache_path})
    if spec.cluster.workspace_claim is not None:
        mounts.append({"name": "workspace", "mountPath": spec.workspace})
    for secret in metrics_secrets(spec.cluster):
        mounts.append({"name": secret.name, "mountPath": secret.path, "readOnly": True})
    for number, volume in enumerate(spec.cluster.volumes):
        mount = {"name": f"volume-{number}", "mountPath": volume.path}
        mounts.append({**mount, "readOnly": True} if volume.read_only else mount)
    return mounts


def volume_annotations(spec: JobSpec) -> dict[str, str]:
    """Return the annotations with which GKE's GCS FUSE driver adds its sidecar container; "0" means no limit."""
    if all(volume.bucket is None for volume in spec.cluster.volumes):
        return {}
    limits = {f"gke-gcsfuse/{name}-limit": "0" for name in ("cpu", "memory", "ephemeral-storage")}
    return {"gke-gcsfuse/volumes": "true", **limits}


def _volume_source(spec: JobSpec, name: str, volume: VolumeSection) -> dict[str, Any]:
    read_only = {"readOnly": True} if volume.read_only else {}
    if volume.claim is not None:
        return {"name": name, "persistentVolumeClaim": {"claimName": volume.claim, **read_only}}
    if volume.secret is not None:
        return _secret_volume(name, volume.secret)
    if volume.config_map is not None:
        return {"name": name, "configMap": {"name": volume.config_map}}
    if volume.empty_gib is not None:
        return {"name": name, "emptyDir": {"sizeLimit": gib_quantity(volume.empty_gib)}}
    if volume.nfs is not None:
        server, _, path = volume.nfs.partition(":")
        return {"name": name, "nfs": {"server": server, "path": path, **read_only}}
    assert volume.bucket is not None, "a volume is of exactly one kind"
    return {"name": name, "csi": _bucket_volume(spec, volume.bucket, volume.read_only)}


def _annotation_file(annotation: str) -> dict[str, Any]:
    """Return the file with an annotation of the pod; the kubelet updates it, and it is empty without the annotation."""
    return {"path": JOB_START_FILE, "fieldRef": {"fieldPath": f"metadata.annotations['{annotation}']"}}


def _secret_volume(name: str, secret: str) -> dict[str, Any]:
    return {"name": name, "secret": {"secretName": secret, "defaultMode": 0o440}}


def _bucket_volume(spec: JobSpec, bucket: str, read_only: bool) -> dict[str, Any]:
    """Return a volume whose files belong to the pod's user; slashes in object names make folders."""
    user = 0 if spec.security_mode == "privileged" else USER_ID
    options = f"implicit-dirs,uid={user},gid={USER_ID}"
    return {
        "driver": "gcsfuse.csi.storage.gke.io",
        **({"readOnly": True} if read_only else {}),
        "volumeAttributes": {"bucketName": bucket, "mountOptions": options},
    }


def pod_template(
    spec: JobSpec,
    container: str,
    *,
    environment: Iterable[Mapping[str, Any]] = (),
    ports: dict[str, int] | None = None,
    restart: str | None = None,
) -> dict[str, Any]:
    """Return the pod template, with additional environment variables and additional ports by name.

    Args:
        container: name of the main container.
        restart: restartPolicy; None if the kind of job sets it.
    """
    pod: dict[str, Any] = {"restartPolicy": restart} if restart else {}
    pod |= {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": math.ceil(spec.grace_seconds) + KILL_MARGIN_SECONDS,
        "securityContext": pod_security(spec),
    }
    pod |= pod_placement.pod_placement(spec)
    if daemons := gpudirect.gpudirect_daemons(spec):
        pod["initContainers"] = daemons
    pod["containers"] = [_container(spec, container, environment, ports or {})]
    pod["volumes"] = [*pod_volumes(spec), *gpudirect.gpudirect_volumes(spec)]
    annotations = {
        **volume_annotations(spec),
        **pod_placement.placement_annotations(spec),
        **gpudirect.gpudirect_annotations(spec),
    }
    return {
        "metadata": {"labels": spec.labels, "annotations": {**annotations, **spec.cluster.annotations}},
        "spec": pod,
    }


def pod_security(spec: JobSpec) -> dict[str, Any]:
    """Return the security context of the pod: its user, and the seccomp profile."""
    if spec.security_mode == "privileged":
        return {"runAsUser": 0, "fsGroup": USER_ID, "fsGroupChangePolicy": "OnRootMismatch"}
    return restricted_pod_security()


def restricted_pod_security() -> dict[str, Any]:
    return {
        "runAsNonRoot": True,
        "runAsUser": USER_ID,
        "runAsGroup": USER_ID,
        "fsGroup": USER_ID,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security(spec: JobSpec) -> dict[str, Any]:
    """Return the security context of the container, privileged if it needs devices of the host."""
    if spec.security_mode == "privileged":
        return {"privileged": spec.needs_accelerators, "readOnlyRootFilesystem": True}
    return restricted_container_security()


def restricted_container_security() -> dict[str, Any]:
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def container_resources(spec: JobSpec) -> dict[str, Any]:
    """Return requests and limits; they are equal if the document or the hardware names them.

    Equal ones let a node evict other pods first.
    """
    resources = spec.resources
    return {
        "requests": _resource_amounts(spec, resources.request.cpus, resources.request.memory_gib),
        "limits": _resource_amounts(spec, resources.cpus, resources.memory_gib),
    }


def _resource_amounts(spec: JobSpec, cpus: float, memory_gib: float) -> dict[str, str]:
    """Return the amounts of a request or a limit as Kubernetes writes them; 0 is left out."""
    resources, amounts = spec.resources, {}
    if cpus:
        amounts["cpu"] = f"{cpus:g}"
    if memory_gib:
        amounts["memory"] = gib_quantity(memory_gib)
    amounts["ephemeral-storage"] = gib_quantity(resources.ephemeral_gib)
    if resources.accelerators and resources.resource:
        amounts[resources.resource] = str(resources.accelerators)
    return amounts


def value_variable(name: str, text: object) -> dict[str, Any]:
    return {"name": name, "value": str(text)}


def field_variable(name: str, path: str) -> dict[str, Any]:
    """Return an environment variable with a field of the pod, such as a label."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _container(
    spec: JobSpec, name: str, environment: Iterable[Mapping[str, Any]], ports: dict[str, int]
) -> dict[str, Any]:
    container: dict[str, Any] = {"name": name, "image": spec.image}
    if spec.cluster.image_pull_policy:
        container["imagePullPolicy"] = spec.cluster.image_pull_policy
    numbers = ports | _tpu_ports(spec) | ({} if spec.stage in ("report", "predict") else {"metrics": METRICS_PORT})
    container |= {
        "command": gpudirect.gpudirect_command(spec),
        "env": _container_environment(spec, environment),
        "resources": container_resources(spec),
    }
    if numbers:
        container["ports"] = [
            {"name": port, "containerPort": number, "protocol": "TCP"} for port, number in numbers.items()
        ]
    container |= {
        "securityContext": container_security(spec),
        "volumeMounts": [*container_mounts(spec), *gpudirect.gpudirect_mounts(spec)],
        "terminationMessagePath": termination_message.TERMINATION_PATH,
        "terminationMessagePolicy": "File",
    }
    return container


def _tpu_ports(spec: JobSpec) -> dict[str, int]:
    """Return the ports, as documentation and for admission policies: pods of a job reach each other on every port."""
    if spec.hardware.kind != "tpu":
        return {}
    return TPU_PORTS | MEGASCALE_PORT if spec.slices > 1 else TPU_PORTS


def _container_environment(spec: JobSpec, additional: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return our variables, then those that the document adds or replaces."""
    variables = [
        value_variable(env.RUN_DOCUMENT, spec.document),
        value_variable(env.TERMINATION_LOG, termination_message.TERMINATION_PATH),
        value_variable("HOME", TEMPORARY_PATH),
        *additional,
    ]
    if spec.stage == "train":
        variables.append(value_variable(env.JOB_START, f"{POD_INFO_PATH}/{JOB_START_FILE}"))
    if spec.launcher_grace_seconds:
        variables.append(value_variable(env.LAUNCHER_GRACE, f"{spec.launcher_grace_seconds:g}"))
    if spec.engine == "jax" and spec.needs_accelerators:
        variables.append(value_variable("JAX_PLATFORMS", JAX_PLATFORMS[spec.hardware.kind]))
    if spec.hardware.kind == "gpu":
        variables.append(value_variable("LD_LIBRARY_PATH", gpudirect.library_path(spec, NVIDIA_LIBRARIES)))
        variables += [value_variable("NCCL_DEBUG", "WARN")] if spec.nodes > 1 else []
    variables += gpudirect.gpudirect_environment(spec)
    variables = [entry for entry in variables if entry["name"] not in spec.cluster.env]
    return [*variables, *(value_variable(name, text) for name, text in spec.cluster.env.items())]
