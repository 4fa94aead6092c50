"""Executor of a package's pods on a real cluster, for tests.support.package_runner."""

import time
from typing import Any

from kubernetes.client import CoreV1Api
from kubernetes.client.exceptions import ApiException

from tests.support.package_runner import PodEnd

POLL_SECONDS = 0.5
STUCK_SECONDS = 180.0
"""Time limit for the start of a pod, seconds; after it, waiting does not help."""


class ClusterHost:
    """Runs pods in a namespace, one per call; `owner` is an owner reference of all of them."""

    def __init__(self, core: CoreV1Api, namespace: str, owner: dict[str, Any] | None = None) -> None:
        self._core, self._namespace, self._owner = core, namespace, owner

    def run(self, manifest: dict[str, Any]) -> PodEnd:
        name = manifest["metadata"]["name"]
        if self._owner is not None:
            manifest["metadata"]["ownerReferences"] = [self._owner]
        self._core.create_namespaced_pod(self._namespace, manifest)
        deadline = time.monotonic() + STUCK_SECONDS
        while True:
            try:
                pod = self._core.read_namespaced_pod(name, self._namespace)
            except ApiException as error:
                if error.status == 404:
                    return PodEnd(None, "")
                raise
            if pod.status.phase in ("Succeeded", "Failed"):
                return PodEnd(_exit_code(pod), self._log(name))
            assert pod.status.phase != "Pending" or time.monotonic() < deadline, self._why(name, pod)
            time.sleep(POLL_SECONDS)

    def kill(self, name: str) -> None:
        self._core.delete_namespaced_pod(name, self._namespace, grace_period_seconds=0)

    def _log(self, name: str) -> str:
        raw = self._core.read_namespaced_pod_log(name, self._namespace, _preload_content=False)
        return bytes(raw.data).decode("utf-8", "replace")

    def _why(self, name: str, pod: Any) -> str:
        events = self._core.list_namespaced_event(self._namespace, field_selector=f"involvedObject.name={name}").items
        return f"{name} does not start: {[event.message for event in events]}: {pod.status}"


def _exit_code(pod: Any) -> int | None:
    ended = [status.state.terminated for status in pod.status.container_statuses or () if status.state.terminated]
    return int(ended[0].exit_code) if ended else None
