"""Inventory of a cluster: kinds of jobs and their controllers, KFP, fitting nodes, default settings of the chart."""

import re
from collections.abc import Iterator, Sequence
from decimal import Decimal

from podscale.config import Defaults
from podscale.kubernetes.client import ClusterClient
from podscale.kubernetes.errors import ApiError
from podscale.kubernetes.job_spec import JobSpec
from podscale.kubernetes.pod_state import name_of
from podscale.kubernetes.render import pod_placement
from podscale.kubernetes.resources import (
    CONFIG_MAPS,
    DEPLOYMENTS,
    JOB_KINDS,
    KIND_PROVIDERS,
    NODES,
    KubernetesObject,
    ResourceKind,
)
from podscale.util.formatting import format_count
from podscale.util.terminal import CheckResult, CheckStatus

_QUANTITY_PATTERN = re.compile(r"^([0-9.]+)([a-zA-Z]*)$")
_QUANTITY_SUFFIXES = {
    "": Decimal(1),
    "m": Decimal("0.001"),
    **{name: Decimal(1000) ** power for power, name in enumerate(("k", "M", "G", "T", "P"), 1)},
    **{name: Decimal(1024) ** power for power, name in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi"), 1)},
}


def parse_quantity(text: object) -> Decimal:
    """Parse a Kubernetes quantity such as 100m, 1536Mi or 4."""
    found = _QUANTITY_PATTERN.match(str(text))
    return Decimal(found[1]) * _QUANTITY_SUFFIXES.get(found[2], Decimal(1)) if found else Decimal(0)


def fitting_nodes(api: ClusterClient, spec: JobSpec) -> Iterator[CheckResult]:
    """Return the nodes with the labels and the size that one pod needs, including nodes in use."""
    subject, need = f"nodes for {spec.hardware.name}", format_count(spec.nodes, "pod")
    try:
        nodes, _ = api.list(NODES, keep=_node_size)
    except ApiError:
        yield CheckResult(subject, "note", "may not be looked at with these credentials", "ask for the node pools")
        return
    wanted = pod_placement.node_selector(spec)
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


CONTROLLER_NAMES = {
    "pytorchjob": ("training-operator",),
    "jaxjob": ("training-operator",),
    "trainjob": ("trainer-controller-manager", "jobset-controller"),
    "jobset": ("jobset-controller",),
}
"""Deployments that must be up for a kind of job, by what their names hold whether they come by manifest or chart."""
KUEUE_CONFIG = ("kueue-system", "kueue-manager-config")
KUEUE_NAMES = {
    "pytorchjob": "kubeflow.org/pytorchjob",
    "jaxjob": "kubeflow.org/jaxjob",
    "trainjob": "trainer.kubeflow.org/trainjob",
    "jobset": "jobset.x-k8s.io/jobset",
    "job": "batch/job",
}
KFP_HEALTH = "/api/v1/namespaces/kubeflow/services/ml-pipeline:8888/proxy/apis/v2beta1/healthz"
MONITOR_KINDS = (
    ResourceKind("monitoring.coreos.com", "v1", "PodMonitor", "podmonitors"),
    ResourceKind("monitoring.googleapis.com", "v1", "PodMonitoring", "podmonitorings"),
)


def check_job_kinds(api: ClusterClient, backend: str) -> Iterator[CheckResult]:
    """Check which kinds of job the cluster serves; the wanted one is required."""
    for name, resource in JOB_KINDS.items():
        if name == "job":
            continue
        subject = f"kind {resource.kind}"
        if api.serves(resource):
            yield CheckResult(subject, "ok", resource.api_version)
            continue
        served = api.served_versions(resource.group)
        found = f"this cluster has {resource.group} {', '.join(served)}" if served else "not installed"
        verdict: CheckStatus = "missing" if name == backend else "note"
        yield CheckResult(
            subject, verdict, found, f"for launch.backend={name}: {KIND_PROVIDERS[resource.group].install}"
        )


def check_controllers(api: ClusterClient, backend: str) -> Iterator[CheckResult]:
    """Check that the operators of the wanted kind of job run."""
    wanted = CONTROLLER_NAMES.get(backend, ())
    deployments = _list_deployments(api)
    if deployments is None:
        if wanted:
            yield CheckResult(
                "operators", "note", "may not be looked at with these credentials", "ask whether they are up"
            )
        return
    for name in wanted:
        found = next((one for one in deployments if name in name_of(one)), None)
        if found is None:
            yield CheckResult(
                name, "note", "no Deployment is named like this", "it may run under another name, or not at all"
            )
            continue
        ready = int((found.get("status") or {}).get("readyReplicas") or 0)
        where = found["metadata"]["namespace"]
        yield CheckResult(
            name,
            "ok" if ready else "missing",
            f"{ready} ready in namespace {where}, {_container_image(found)}",
            "" if ready else f"kubectl describe pods -n {where}",
        )


def check_init_container(api: ClusterClient) -> Iterator[CheckResult]:
    """Check for the init container of workers with a master, which restricted pod security refuses."""
    for found in _list_deployments(api) or ():
        if name_of(found) == "training-operator" and "pytorch-init-container-template-file" not in str(found["spec"]):
            yield CheckResult(
                "init container",
                "note",
                "the training operator's own has no security context, so PyTorchJobs with a Master are refused here",
                "Podscale's have workers alone and run; for others give the operator "
                "--pytorch-init-container-template-file",
            )


def check_managed_by_kueue(api: ClusterClient, backend: str) -> Iterator[CheckResult]:
    """Check that Kueue manages the kind of job; by default it ignores PyTorchJob and JAXJob."""
    namespace, name = KUEUE_CONFIG
    try:
        found = api.get(CONFIG_MAPS, name, namespace=namespace)
    except ApiError:
        advice = f"see that {KUEUE_NAMES.get(backend, backend)} is among integrations.frameworks of Kueue"
        yield CheckResult(
            "Kueue's kinds", "note", "its configuration may not be looked at with these credentials", advice
        )
        return
    text = "\n".join((found.get("data") or {}).values())
    active = {line.strip().lstrip("- ").strip("\"'") for line in text.splitlines() if not line.strip().startswith("#")}
    wanted = KUEUE_NAMES.get(backend, "")
    if wanted in active:
        yield CheckResult("Kueue's kinds", "ok", f"{wanted} is managed")
    else:
        advice = f"add {wanted} to integrations.frameworks in ConfigMap {name} of {namespace}, and restart Kueue"
        yield CheckResult(
            "Kueue's kinds", "missing", f"{wanted} is not managed: the job would pass by the quota", advice
        )


def check_pipelines(api: ClusterClient) -> Iterator[CheckResult]:
    """Check that Kubeflow Pipelines answers, through the API server's proxy."""
    subject, advice = "Kubeflow Pipelines", "only `podscale pipeline` needs it; `podscale submit` does not"
    try:
        answers = api.is_service_healthy(KFP_HEALTH)
    except ApiError:
        yield CheckResult(subject, "note", "may not be asked with these credentials", advice)
        return
    if answers:
        yield CheckResult(subject, "ok", "answers in namespace kubeflow")
    else:
        yield CheckResult(subject, "note", "no service ml-pipeline that answers in namespace kubeflow", advice)


def check_monitoring(api: ClusterClient) -> Iterator[CheckResult]:
    """Check that Prometheus can scrape the pods' metrics through an object of the chart."""
    found = [resource for resource in MONITOR_KINDS if api.serves(resource)]
    if found:
        yield CheckResult("monitoring", "ok", ", ".join(f"{one.kind} ({one.api_version})" for one in found))
    else:
        advice = "install the Prometheus Operator, or use managed Prometheus on GKE; training runs without"
        yield CheckResult("monitoring", "note", "neither PodMonitor nor PodMonitoring", advice)


def _list_deployments(api: ClusterClient) -> Sequence[KubernetesObject] | None:
    try:
        return api.list(DEPLOYMENTS, namespace="")[0]
    except ApiError:
        return None


def _container_image(deployment: KubernetesObject) -> str:
    return str(deployment["spec"]["template"]["spec"]["containers"][0]["image"])


DEFAULTS_CONFIG_MAP = "podscale-defaults"
DEFAULTS_KEY = "defaults.yaml"


def find_cluster_defaults(api: ClusterClient) -> Defaults | None:
    """Return the default settings of the namespace; None if there are none or they may not be read."""
    try:
        found = api.get_or_none(CONFIG_MAPS, DEFAULTS_CONFIG_MAP)
    except ApiError as error:
        if error.status != 403:
            raise
        return None
    text = (found.get("data") or {}).get(DEFAULTS_KEY) if found else None
    return Defaults(text, f"ConfigMap {DEFAULTS_CONFIG_MAP} of namespace {api.namespace}") if text else None
