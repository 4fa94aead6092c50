"""Volume provisioner: a local directory for every claim of the class `standard`, removed with the volume.

The provisioner in kube-controller-manager creates directories that only root may enter; our containers are not root.
"""

import shutil
import sys
import threading
from collections.abc import Callable
from typing import Any

from kubernetes import client, config, watch

from tests.cluster.lab import places

PROVISIONER = "podscale.dev/directories"
CLASS = "standard"


def volume_for(claim: Any) -> dict[str, Any]:
    """Return the PersistentVolume for a claim, named after it, so that a second one is rejected as a duplicate."""
    name = f"pvc-{claim.metadata.uid}"
    reference = {"kind": "PersistentVolumeClaim", "name": claim.metadata.name, "namespace": claim.metadata.namespace}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name, "annotations": {"pv.kubernetes.io/provisioned-by": PROVISIONER}},
        "spec": {
            "accessModes": claim.spec.access_modes,
            "capacity": {"storage": claim.spec.resources.requests["storage"]},
            "claimRef": {**reference, "apiVersion": "v1", "uid": claim.metadata.uid},
            "hostPath": {"path": str(places.VOLUMES / name)},
            "persistentVolumeReclaimPolicy": "Delete",
            "storageClassName": CLASS,
        },
    }


def provide(core: client.CoreV1Api, claim: Any) -> None:
    if claim.spec.storage_class_name != CLASS or claim.status.phase != "Pending" or claim.spec.volume_name:
        return
    volume = volume_for(claim)
    directory = places.VOLUMES / volume["metadata"]["name"]
    directory.mkdir(parents=True, exist_ok=True)
    directory.chmod(0o777)
    try:
        core.create_persistent_volume(volume)
    except client.ApiException as error:
        if error.status != 409:
            raise


def reclaim(core: client.CoreV1Api, volume: Any) -> None:
    owner = (volume.metadata.annotations or {}).get("pv.kubernetes.io/provisioned-by")
    if owner != PROVISIONER or volume.status.phase != "Released":
        return
    shutil.rmtree(places.VOLUMES / volume.metadata.name, ignore_errors=True)
    core.delete_persistent_volume(volume.metadata.name)


def follow(listing: Callable[..., Any], act: Callable[[Any], None]) -> None:
    """Process every object, forever; a watch that ends or fails restarts with a new list."""
    pause = threading.Event()
    while True:
        try:
            for event in watch.Watch().stream(listing, timeout_seconds=300):
                if event["type"] in ("ADDED", "MODIFIED"):
                    act(event["object"])
        except Exception as error:  # the API server may restart: retry after any error
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            pause.wait(1)


def main() -> None:
    config.load_kube_config(str(places.STATE / "provisioner.kubeconfig"))
    core = client.CoreV1Api()
    volumes = threading.Thread(target=follow, args=(core.list_persistent_volume, lambda volume: reclaim(core, volume)))
    volumes.start()
    follow(core.list_persistent_volume_claim_for_all_namespaces, lambda claim: provide(core, claim))


if __name__ == "__main__":
    main()
