"""The volumes of a pod: what it may write, the workspace, and what the document adds."""

from typing import Any

from podscale.config.launch import VolumeSection
from podscale.launch.jobspec import JobSpec, metrics_secrets

TEMPORARY_PATH = "/tmp"
SHARED_MEMORY_PATH = "/dev/shm"
USER_ID = 65532
"""uid and gid of our images."""


def gib_quantity(gib: float) -> str:
    """GiB as Kubernetes writes them."""
    return f"{gib:g}Gi" if gib == int(gib) else f"{round(gib * 1024)}Mi"


def pod_volumes(spec: JobSpec) -> list[dict[str, Any]]:
    """The pod's volumes."""
    demand = spec.resources
    found: list[dict[str, Any]] = [
        {"name": "tmp", "emptyDir": {"sizeLimit": gib_quantity(demand.temporary_gib)}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": gib_quantity(demand.shm_gib)}},
    ]
    if spec.cache_path is not None:
        found.append({"name": "cache", "emptyDir": {"sizeLimit": gib_quantity(demand.cache_gib)}})
    if spec.cluster.workspace_claim is not None:
        found.append({"name": "workspace", "persistentVolumeClaim": {"claimName": spec.cluster.workspace_claim}})
    found += [_secret_volume(mount.name, mount.secret) for mount in metrics_secrets(spec.cluster)]
    return [*found, *(_volume_source(spec, f"volume-{n}", volume) for n, volume in enumerate(spec.cluster.volumes))]


def container_mounts(spec: JobSpec) -> list[dict[str, Any]]:
    """Where the container finds them."""
    found: list[dict[str, Any]] = [
        {"name": "tmp", "mountPath": TEMPORARY_PATH},
        {"name": "shm", "mountPath": SHARED_MEMORY_PATH},
    ]
    if spec.cache_path is not None:
        found.append({"name": "cache", "mountPath": spec.cache_path})
    if spec.cluster.workspace_claim is not None:
        found.append({"name": "workspace", "mountPath": spec.workspace})
    for secret in metrics_secrets(spec.cluster):
        found.append({"name": secret.name, "mountPath": secret.path, "readOnly": True})
    for number, volume in enumerate(spec.cluster.volumes):
        mount = {"name": f"volume-{number}", "mountPath": volume.path}
        found.append({**mount, "readOnly": True} if volume.read_only else mount)
    return found


def volume_annotations(spec: JobSpec) -> dict[str, str]:
    """What GKE's GCS FUSE driver looks for: it then adds a container of its own to the pod.

    A limit of 0 lets that container use what the node has.
    """
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


def _secret_volume(name: str, secret: str) -> dict[str, Any]:
    return {"name": name, "secret": {"secretName": secret, "defaultMode": 0o440}}


def _bucket_volume(spec: JobSpec, bucket: str, read_only: bool) -> dict[str, Any]:
    """Files of the bucket belong to the user of the pod; folders exist where objects have them in their names."""
    user = 0 if spec.security_mode == "privileged" else USER_ID
    options = f"implicit-dirs,uid={user},gid={USER_ID}"
    return {
        "driver": "gcsfuse.csi.storage.gke.io",
        **({"readOnly": True} if read_only else {}),
        "volumeAttributes": {"bucketName": bucket, "mountOptions": options},
    }
