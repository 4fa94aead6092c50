"""Whether the nodes of a cluster fit what the pods of a job ask for."""

import re
from collections.abc import Iterator
from decimal import Decimal

from podscale.launch.cluster.api import ClusterClient
from podscale.launch.cluster.errors import ApiError
from podscale.launch.cluster.pods import name_of
from podscale.launch.cluster.resources import NODES, KubernetesObject
from podscale.launch.jobspec import JobSpec
from podscale.launch.render import placement
from podscale.util.formatting import format_count
from podscale.util.terminal import CheckResult

_QUANTITY_PATTERN = re.compile(r"^([0-9.]+)([a-zA-Z]*)$")
_QUANTITY_SUFFIXES = {
    "": Decimal(1),
    "m": Decimal("0.001"),
    **{name: Decimal(1000) ** power for power, name in enumerate(("k", "M", "G", "T", "P"), 1)},
    **{name: Decimal(1024) ** power for power, name in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi"), 1)},
}


def parse_quantity(text: object) -> Decimal:
    """A quantity as Kubernetes writes it: 100m, 1536Mi, 4."""
    found = _QUANTITY_PATTERN.match(str(text))
    return Decimal(found[1]) * _QUANTITY_SUFFIXES.get(found[2], Decimal(1)) if found else Decimal(0)


def fitting_nodes(api: ClusterClient, spec: JobSpec) -> Iterator[CheckResult]:
    """Nodes with the labels and the size that one pod needs. Nodes in use count: this is about pools, not about now."""
    subject, need = f"nodes for {spec.hardware.name}", format_count(spec.nodes, "pod")
    try:
        nodes, _ = api.list(NODES, keep=_node_size)
    except ApiError:
        yield CheckResult(subject, "note", "may not be looked at with these credentials", "ask for the node pools")
        return
    wanted = placement.node_selector(spec)
    labelled = [node for node in nodes if wanted.items() <= node["labels"].items()]
    fitting = [node for node in labelled if not _missing_resources(node, spec)]
    if len(fitting) >= spec.nodes:
        yield CheckResult(subject, "ok", f"{format_count(len(fitting), 'node')} for {need}")
    elif fitting:
        advice = "several pods may share a node, or the pool may grow; otherwise lower launch.nodes"
        yield CheckResult(subject, "note", f"{format_count(len(fitting), 'node')} for {need}", advice)
    elif labelled:
        lacking = "; ".join(f"{node['name']} has {_missing_resources(node, spec)}" for node in labelled[:3])
        yield CheckResult(
            subject, "missing", f"too small: {lacking}", "ask for less in launch.resources, or a larger pool"
        )
    else:
        labels = ", ".join(f"{name}={value}" for name, value in wanted.items())
        advice = "make a node pool with them; a pool that starts at zero nodes, or auto-provisioning, is not seen here"
        yield CheckResult(subject, "note", f"none of {format_count(len(nodes), 'node')} is labelled {labels}", advice)


def _node_size(node: KubernetesObject) -> KubernetesObject:
    return {
        "name": name_of(node),
        "labels": node["metadata"].get("labels") or {},
        "allocatable": (node.get("status") or {}).get("allocatable") or {},
    }


def _missing_resources(node: KubernetesObject, spec: JobSpec) -> str:
    """What a node has too little of for one pod, in words; empty where it fits."""
    demand = spec.resources
    asked = {
        "cpu": Decimal(str(demand.cpus)),
        "memory": Decimal(str(demand.memory_gib)) * 2**30,
        "ephemeral-storage": Decimal(str(demand.ephemeral_gib)) * 2**30,
    }
    if demand.resource is not None:
        asked[demand.resource] = Decimal(demand.accelerators)
    found = node["allocatable"]
    return ", ".join(
        f"{found.get(name, '0')} {name}" for name, need in asked.items() if parse_quantity(found.get(name, "0")) < need
    )
