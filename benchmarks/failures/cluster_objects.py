"""Objects of simulated clusters: nodes whose kubelet kwok simulates, and namespaces for runs."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from kubernetes import client


def fake_node(
    name: str, amounts: Mapping[str, str], labels: Mapping[str, str], taints: Sequence[Mapping[str, str]]
) -> dict[str, Any]:
    """Return a node for kwok, with room for 110 pods.

    Args:
        amounts: Amount of each resource except pods.
        labels: Labels besides those of host name and operating system.
    """
    metadata = {
        "name": name,
        "labels": {**labels, "kubernetes.io/hostname": name, "kubernetes.io/os": "linux"},
        "annotations": {"kwok.x-k8s.io/node": "fake"},
    }
    status = {key: {**amounts, "pods": "110"} for key in ("capacity", "allocatable")}
    return {"metadata": metadata, "spec": {"taints": list(taints)}, "status": status}


@contextmanager
def new_namespace(core: client.CoreV1Api, name: str, labels: Mapping[str, str] | None = None) -> Iterator[str]:
    """Create a namespace with a claim `workspace` and yield its name; request its deletion afterwards."""
    core.create_namespace({"metadata": {"name": name, "labels": dict(labels or {})}})
    try:
        claim = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "2Gi"}}}
        core.create_namespaced_persistent_volume_claim(name, {"metadata": {"name": "workspace"}, "spec": claim})
        yield name
    finally:
        core.delete_namespace(name)
