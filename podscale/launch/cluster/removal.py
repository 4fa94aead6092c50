"""Deleting one object, and no other that has its name by now."""

import time

from podscale.errors import PodscaleError
from podscale.launch.cluster.api import ClusterClient
from podscale.launch.cluster.errors import ApiConflict, ApiNotFound
from podscale.launch.cluster.resources import ResourceKind

DELETE_TIMEOUT_SECONDS = 600.0
"""How long a job that is being deleted may take: its pods save first."""


def delete_job(api: ClusterClient, resource: ResourceKind, name: str, uid: str) -> bool:
    """Deletes this very job; False where it was gone, or another one has its name."""
    try:
        api.delete(resource, name, uid=uid)
    except (ApiNotFound, ApiConflict):
        return False
    return True


def wait_until_gone(api: ClusterClient, resource: ResourceKind, name: str, uid: str) -> None:
    """Returns when the job and its pods are gone. Raises PodscaleError where that takes too long."""
    until = time.monotonic() + DELETE_TIMEOUT_SECONDS
    while (found := api.get_or_none(resource, name)) is not None and found["metadata"]["uid"] == uid:
        if time.monotonic() > until:
            raise PodscaleError(
                f"is being deleted for {DELETE_TIMEOUT_SECONDS / 60:.0f} minutes",
                field=f"{resource.kind} {name}",
                hint="Look at its pods and finalizers with "
                f"`kubectl get {resource.full_name},pods -n {api.namespace} -o wide`",
            )
        time.sleep(1.0)
