"""Nodes and pods of the simulated cluster: kwok runs the pods, and this module does what kubelets do when pods end.

Written with the plain client of Kubernetes, independently of Podscale's launcher. The nodes have a label and a taint of
their own, so that no other pod of the cluster comes to them, and the pods of these runs to no other node.
"""

import itertools
import json
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from kubernetes import client
from kubernetes.client.exceptions import ApiException

from benchmarks.failures.cluster_objects import fake_node
from benchmarks.failures.fleet_watch import Pod

NODE_LABEL = "podscale.dev/fake-fleet"
"""Label and taint of the nodes; the value is the namespace of their runs."""
NODE_CPUS, NODE_MEMORY_GIB = 32, 64
"""Size of a node, which one pod fills."""
FINALIZER_SECONDS = 20.0
"""Timeout for the Job controller to count a failed pod, seconds."""
PARALLEL_REQUESTS = 8


class FakeNodes:
    """Nodes of one namespace's runs: `count` of them at any time."""

    def __init__(self, core: client.CoreV1Api, namespace: str, count: int) -> None:
        self._core, self._namespace, self._count = core, namespace, count
        self._numbers = itertools.count(1)
        self._threads = ThreadPoolExecutor(PARALLEL_REQUESTS)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Create the nodes; delete all of them afterwards."""
        try:
            list(self._threads.map(lambda _: self._add(), range(self._count)))
            yield
        finally:
            nodes = self._core.list_node(label_selector=f"{NODE_LABEL}={self._namespace}").items
            list(self._threads.map(self._core.delete_node, [node.metadata.name for node in nodes]))
            self._threads.shutdown()

    def fail(self, pod: Pod) -> None:
        """Delete the node of a pod and end the pod, as the controllers of nodes and pods do for a machine that is gone.

        The cloud's controller deletes the node, and the collector of orphaned pods (podgc) marks its pods as failed and
        deletes them. Here that takes no minute. A new node joins instead.
        """
        self._core.delete_node(pod.spec.node_name)
        disrupted = {
            "type": "DisruptionTarget",
            "status": "True",
            "reason": "DeletionByPodGC",
            "message": "PodGC: node no longer exists",
            "lastTransitionTime": _now(),
        }
        name = pod.metadata.name
        try:
            status = {"phase": "Failed", "conditions": [disrupted]}
            self._core.patch_namespaced_pod_status(name, self._namespace, {"status": status})
            self._wait_until_counted(name, pod.metadata.uid)
            options = client.V1DeleteOptions(
                grace_period_seconds=0, preconditions=client.V1Preconditions(uid=pod.metadata.uid)
            )
            self._core.delete_namespaced_pod(name, self._namespace, body=options)
        except ApiException as error:
            if error.status not in (404, 409):  # an operator was faster
                raise
        self._add()

    def restart_containers(self, pods: Iterable[Pod]) -> None:
        """Restart the containers of surviving pods in place, as kubelets do: their processes have lost a peer."""
        now = _now()
        exited = {"exitCode": 1, "reason": "Error", "finishedAt": now, "message": _message(1, "lost a peer")}

        def restart(pod: Pod) -> None:
            status = _container(pod) | {"state": {"running": {"startedAt": now}}, "lastState": {"terminated": exited}}
            self._set_container(pod, status | {"restartCount": status["restartCount"] + 1, "ready": True}, "Running")

        list(self._threads.map(restart, pods))

    def complete(self, pods: Iterable[Pod]) -> None:
        """End pods with exit code 0, as kubelets report it."""
        exited = {"exitCode": 0, "reason": "Completed", "finishedAt": _now(), "message": _message(0, "")}

        def complete(pod: Pod) -> None:
            status = _container(pod) | {"state": {"terminated": exited}, "ready": False}
            self._set_container(pod, status, "Succeeded")

        list(self._threads.map(complete, pods))

    def _add(self) -> None:
        name = f"{self._namespace}-{next(self._numbers)}"
        amounts = {"cpu": str(NODE_CPUS + 1), "memory": f"{NODE_MEMORY_GIB + 1}Gi", "ephemeral-storage": "6Ti"}
        taint = {"key": NODE_LABEL, "value": self._namespace, "effect": "NoSchedule"}
        self._core.create_node(fake_node(name, amounts, {NODE_LABEL: self._namespace}, [taint]))

    def _set_container(self, pod: Pod, container: dict[str, Any], phase: str) -> None:
        status = {"phase": phase, "containerStatuses": [container]}
        try:
            self._core.patch_namespaced_pod_status(pod.metadata.name, self._namespace, {"status": status})
        except ApiException as error:
            if error.status != 404:  # an operator has deleted it
                raise

    def _wait_until_counted(self, name: str, uid: str) -> None:
        """Wait until the Job controller has counted the failed pod, if it belongs to a Job: its finalizer is gone."""
        deadline = time.monotonic() + FINALIZER_SECONDS
        while time.monotonic() < deadline:
            metadata = self._core.read_namespaced_pod(name, self._namespace).metadata
            if metadata.uid != uid or not metadata.finalizers:
                return
            time.sleep(0.1)


def _container(pod: Pod) -> dict[str, Any]:
    """Return the status of a pod's container as JSON values."""
    (status,) = pod.status.container_statuses
    values: dict[str, Any] = client.ApiClient().sanitize_for_serialization(status)
    return values


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _message(exit_code: int, error: str) -> str:
    return json.dumps({"stage": "train", "exit_code": exit_code, "error": error})
