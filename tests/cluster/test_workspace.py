"""The chart's `workspace.prepare` on volumes owned by root, with the real kubelet."""

import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.cluster import USER, Cluster, plain_pod
from tests.cluster.lab import places
from tests.cluster.release import install, kubectl

pytestmark = pytest.mark.timeout(600)
CLAIM = "shared"
HERE = {"key": "kubernetes.io/hostname", "operator": "In", "values": [places.NAME]}
NODE_AFFINITY: dict[str, Any] = {
    "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [HERE]}]}},
}
Volume = Callable[[str], Path]


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    with cluster.namespace("workspace") as name:
        yield name


@pytest.fixture
def volume(cluster: Cluster, namespace: str) -> Iterator[Volume]:
    """volume(kind) binds a directory that only root may write to the claim `shared` of the namespace.

    `kind` is `local`, whose owner the kubelet changes for a pod with an fsGroup, or `hostPath`, whose owner it keeps.
    """
    if not cluster.is_lab:
        pytest.skip("needs directories of the node: runs only if this machine is the node")
    name = f"root-{uuid.uuid4().hex[:8]}"
    folder = places.VOLUMES / name

    def make(kind: str) -> Path:
        folder.mkdir(parents=True, mode=0o755)
        spec = {
            "accessModes": ["ReadWriteMany"],
            "capacity": {"storage": "1Gi"},
            "claimRef": {"namespace": namespace, "name": CLAIM},
            "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": "",
            kind: {"path": str(folder)},
            **(NODE_AFFINITY if kind == "local" else {}),
        }
        cluster.core.create_persistent_volume({"metadata": {"name": name}, "spec": spec})
        claim = {"accessModes": ["ReadWriteMany"], "storageClassName": "", "volumeName": name,
                 "resources": {"requests": {"storage": "1Gi"}}}  # fmt: skip
        cluster.core.create_namespaced_persistent_volume_claim(namespace, {"metadata": {"name": CLAIM}, "spec": claim})
        return folder

    yield make
    cluster.core.delete_persistent_volume(name)
    shutil.rmtree(folder, ignore_errors=True)


def prepare(namespace: str, launcher_image: str, **options: Any) -> str:
    workspace = {"kind": "existing", "name": CLAIM, "prepare": True}
    return install(namespace, images={"launcher": launcher_image}, workspace=workspace, **options)


def a_task_of_kfp(image: str) -> dict[str, Any]:
    """Return a pod that writes a run directory as user 65532, without fsGroup."""
    pod = plain_pod("task", image, ["mkdir", "-p", "/workspace/runs/digits/logs"])
    del pod["spec"]["securityContext"]["fsGroup"]
    pod["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"] = CLAIM
    return pod


@pytest.mark.cluster_ci
def test_a_volume_of_roots_becomes_writable_for_pods_without_fsgroup(
    cluster: Cluster, namespace: str, volume: Volume, launcher_image: str
) -> None:
    folder = volume("local")
    prepare(namespace, launcher_image)
    cluster.core.create_namespaced_pod(namespace, a_task_of_kfp(launcher_image))
    ended = ("Succeeded", "Failed")
    pod = cluster.wait("the task", lambda: cluster.pod_in(namespace, "task", ended))
    assert pod.status.phase == "Succeeded", cluster.logs(namespace, "task")
    assert folder.stat().st_gid == USER
    assert (folder / "runs" / "digits" / "logs").is_dir()
    jobs = kubectl("get", "jobs", "--namespace", namespace, "-o", "name")
    assert jobs == "", "a successful hook must be deleted"


def test_a_volume_without_fsgroup_fails_the_release_with_the_remedy(
    namespace: str, volume: Volume, launcher_image: str
) -> None:
    folder = volume("hostPath")
    with pytest.raises(AssertionError, match="failed post-install"):
        prepare(namespace, launcher_image)
    log = kubectl("logs", "job/podscale-workspace-prepare", "--namespace", namespace)
    for part in ("/workspace: ", "user 65532", "0:0", "mode 755", "fsGroup", "chown -R 65532:65532"):
        assert part in log
    assert list(folder.iterdir()) == []
