"""Placement of pods: node labels, tolerations, priority, and Kueue's queue.

Labels and taints are GKE's: reservations, Spot VMs, compute classes and placement groups, from its documentation and
from xpk (src/xpk/core/capacity.py).
"""

from typing import Any

from podscale.config.launch import TolerationSection
from podscale.kubernetes.job_spec import JobSpec

TOPOLOGY_LEVEL = "cloud.google.com/gce-topology-block"
"""Level of Kueue's topology for GKE (gke-default) whose machines are one network hop apart."""
NODE_LOST_SECONDS = 60
"""Time after which a pod on a lost node is evicted, seconds (Kubernetes' default: 300)."""


def pod_placement(spec: JobSpec) -> dict[str, Any]:
    """Return the placement fields of a pod's spec; empty ones are left out."""
    cluster = spec.cluster
    fields: dict[str, Any] = {
        "serviceAccountName": cluster.service_account,
        "priorityClassName": cluster.priority_class,
        "runtimeClassName": cluster.runtime_class,
        "imagePullSecrets": [{"name": name} for name in cluster.image_pull_secrets],
        "nodeSelector": node_selector(spec),
        "tolerations": tolerations(spec),
    }
    return {name: value for name, value in fields.items() if value}


def node_selector(spec: JobSpec) -> dict[str, str]:
    """Return the node labels of a pod; stages without accelerators use only the document's labels."""
    cluster = spec.cluster
    labels: dict[str, str] = {}
    if spec.needs_accelerators:
        labels |= spec.hardware.node_selector
        if cluster.spot:
            labels["cloud.google.com/gke-spot"] = "true"
        if cluster.reservation is not None:
            labels["cloud.google.com/reservation-name"] = cluster.reservation
            labels["cloud.google.com/reservation-affinity"] = "specific"
        if cluster.compute_class is not None:
            labels["cloud.google.com/compute-class"] = cluster.compute_class
        if cluster.placement == "compact":
            labels["cloud.google.com/gke-placement-group"] = spec.run
        if cluster.local_ssd:
            labels["cloud.google.com/gke-ephemeral-storage-local-ssd"] = "true"
    return {**labels, **cluster.node_selector}


def tolerations(spec: JobSpec) -> list[dict[str, Any]]:
    """Return the tolerations of the hardware and of the document, and those for lost nodes (NODE_LOST_SECONDS)."""
    tolerated: list[dict[str, Any]] = []
    if spec.needs_accelerators:
        if spec.resources.accelerators:
            tolerated.append({"key": spec.resources.resource, "operator": "Exists", "effect": "NoSchedule"})
        if spec.cluster.spot:
            tolerated.append(_equal_toleration("cloud.google.com/gke-spot", "true"))
        if spec.cluster.compute_class is not None:
            tolerated.append(_equal_toleration("cloud.google.com/compute-class", spec.cluster.compute_class))
    tolerated += [_toleration(section) for section in spec.cluster.tolerations]
    return tolerated + [
        {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": NODE_LOST_SECONDS}
        for key in ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
    ]


def placement_annotations(spec: JobSpec) -> dict[str, str]:
    """Return the pod annotations against eviction by an autoscaler, and for Kueue's topology."""
    annotations = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}
    if spec.needs_accelerators and spec.cluster.topology != "none":
        key = f"kueue.x-k8s.io/podset-{spec.cluster.topology}-topology"
        annotations[key] = spec.cluster.topology_level or TOPOLOGY_LEVEL
    return annotations


def queue_labels(spec: JobSpec) -> dict[str, str]:
    if spec.cluster.queue is None or not spec.needs_accelerators:
        return {}
    return {"kueue.x-k8s.io/queue-name": spec.cluster.queue}


def _equal_toleration(key: str, value: str) -> dict[str, Any]:
    return {"key": key, "operator": "Equal", "value": value, "effect": "NoSchedule"}


def _toleration(section: TolerationSection) -> dict[str, Any]:
    fields = section.model_dump(include={"key", "operator", "value", "effect"}) | {"tolerationSeconds": section.seconds}
    return {name: value for name, value in fields.items() if value is not None}
