"""Inventory of a cluster: kinds of job, their operators, nodes that fit, KFP, monitoring."""

from collections.abc import Iterator, Sequence
from decimal import Decimal
from typing import Any

import yaml

from podscale.kubernetes.client import ClusterClient
from podscale.kubernetes.errors import ApiError, ApiNotFound
from podscale.kubernetes.job_spec import JobSpec
from podscale.kubernetes.render import pod_placement
from podscale.kubernetes.resources import (
    CONFIG_MAPS,
    DEPLOYMENTS,
    JOB_KINDS,
    KIND_PROVIDERS,
    NODES,
    KubernetesObject,
    ResourceKind,
    labels_of,
    name_of,
    parse_quantity,
)
from podscale.util.formatting import format_count
from podscale.util.terminal import CheckResult, CheckStatus


def unreadable(subject: str, advice: str) -> CheckResult:
    """Return the result for an object that these credentials may not read."""
    return CheckResult(subject, "note", "these credentials may not read it", advice)


def fitting_nodes(api: ClusterClient, spec: JobSpec) -> Iterator[CheckResult]:
    """Check for nodes with the labels and the size that one pod needs, including nodes in use."""
    subject = f"nodes for {spec.hardware.name}"
    try:
        nodes, _ = api.list(NODES, keep=_node_size)
    except ApiError:
        yield unreadable(subject, "ask the administrator which node pools there are")
        return
    selector = pod_placement.node_selector(spec)
    labelled = [node for node in nodes if selector.items() <= node["labels"].items()]
    fitting = [node for node in labelled if not _missing_resources(node, spec)]
    counts = f"{format_count(len(fitting), 'node')} for {format_count(spec.nodes, 'pod')}"
    if len(fitting) >= spec.nodes:
        yield CheckResult(subject, "ok", counts)
    elif fitting:
        advice = "several pods may share a node, or the pool may grow; otherwise lower launch.nodes"
        yield CheckResult(subject, "note", counts, advice)
    elif labelled:
        sizes = "; ".join(f"{node['name']} has {_missing_resources(node, spec)}" for node in labelled[:3])
        yield CheckResult(
            subject, "missing", f"too small: {sizes}", "request less in launch.resources, or a larger pool"
        )
    else:
        labels = ", ".join(f"{name}={value}" for name, value in selector.items())
        advice = "create a node pool with them; a pool with zero nodes, or auto-provisioning, is not visible here"
        yield CheckResult(subject, "note", f"none of {format_count(len(nodes), 'node')} is labelled {labels}", advice)


def _node_size(node: KubernetesObject) -> KubernetesObject:
    return {
        "name": name_of(node),
        "labels": labels_of(node),
        "allocatable": (node.get("status") or {}).get("allocatable") or {},
    }


def _missing_resources(node: KubernetesObject, spec: JobSpec) -> str:
    """Return the allocatable resources that are too few for one pod, as text; empty if the pod fits."""
    resources, allocatable = spec.resources, node["allocatable"]
    requests = {
        "cpu": Decimal(str(resources.request.cpus)),
        "memory": Decimal(str(resources.request.memory_gib)) * 2**30,
        "ephemeral-storage": Decimal(str(resources.ephemeral_gib)) * 2**30,
    }
    if resources.resource is not None:
        requests[resources.resource] = Decimal(resources.accelerators)
    available = {name: allocatable.get(name, "0") for name in requests}
    missing = [name for name, request in requests.items() if parse_quantity(available[name]) < request]
    return ", ".join(f"{available[name]} {name}" for name in missing)


CONTROLLER_NAMES = {
    "pytorchjob": ("training-operator",),
    "jaxjob": ("training-operator",),
    "trainjob": ("trainer-controller-manager", "jobset-controller"),
    "jobset": ("jobset-controller",),
}
"""Deployments that a kind of job needs, by the part of their names that is the same in manifests and charts."""
KUEUE_CONFIG = ("kueue-system", "kueue-manager-config")
KUEUE_NAMES = {
    "pytorchjob": "kubeflow.org/pytorchjob",
    "jaxjob": "kubeflow.org/jaxjob",
    "trainjob": "trainer.kubeflow.org/trainjob",
    "jobset": "jobset.x-k8s.io/jobset",
    "job": "batch/job",
}
KFP_NAMESPACE = "kubeflow"
WORKFLOW_CONFIG = (KFP_NAMESPACE, "workflow-controller-configmap")
KFP_HEALTH = f"/api/v1/namespaces/{KFP_NAMESPACE}/services/ml-pipeline:8888/proxy/apis/v2beta1/healthz"
MONITOR_KINDS = (
    ResourceKind("monitoring.coreos.com", "v1", "PodMonitor", "podmonitors"),
    ResourceKind("monitoring.googleapis.com", "v1", "PodMonitoring", "podmonitorings"),
)


def check_job_kinds(api: ClusterClient, backend: str) -> Iterator[CheckResult]:
    """Check which kinds of job the cluster serves; that of `backend` is required."""
    for name, resource in JOB_KINDS.items():
        if name == "job":
            continue
        subject = f"kind {resource.kind}"
        if api.serves(resource):
            yield CheckResult(subject, "ok", resource.api_version)
            continue
        served = api.served_versions(resource.group)
        state = f"this cluster has {resource.group} {', '.join(served)}" if served else "not installed"
        verdict: CheckStatus = "missing" if name == backend else "note"
        advice = f"for launch.backend={name}: {KIND_PROVIDERS[resource.group].install}"
        yield CheckResult(subject, verdict, state, advice)


def check_controllers(api: ClusterClient, backend: str) -> Iterator[CheckResult]:
    """Check that the operators of the kind of job run."""
    names = CONTROLLER_NAMES.get(backend, ())
    deployments = _list_deployments(api)
    if deployments is None:
        if names:
            yield unreadable("operators", "ask the administrator whether they run")
        return
    for name in names:
        deployment = next((item for item in deployments if name in name_of(item)), None)
        if deployment is None:
            advice = "it may run under another name, or not at all"
            yield CheckResult(name, "note", "no Deployment has such a name", advice)
            continue
        ready = int((deployment.get("status") or {}).get("readyReplicas") or 0)
        namespace = deployment["metadata"]["namespace"]
        image = deployment["spec"]["template"]["spec"]["containers"][0]["image"]
        yield CheckResult(
            name,
            "ok" if ready else "missing",
            f"{ready} ready in namespace {namespace}, {image}",
            "" if ready else f"kubectl describe pods -n {namespace}",
        )


def check_init_container(api: ClusterClient) -> Iterator[CheckResult]:
    """Check the training operator's init container; restricted Pod Security refuses it without a security context."""
    for item in _list_deployments(api) or ():
        if name_of(item) == "training-operator" and "pytorch-init-container-template-file" not in str(item["spec"]):
            yield CheckResult(
                "init container",
                "note",
                "the training operator's has no security context, so PyTorchJobs with a Master are refused here",
                "Podscale's PyTorchJobs have no Master; for other PyTorchJobs set the operator's "
                "--pytorch-init-container-template-file",
            )


def check_managed_by_kueue(api: ClusterClient, backend: str) -> Iterator[CheckResult]:
    """Check that Kueue manages the kind of job; by default it ignores PyTorchJob and JAXJob."""
    if backend not in KUEUE_NAMES:
        return  # the document is faulty, which another check reports
    framework, (namespace, name) = KUEUE_NAMES[backend], KUEUE_CONFIG
    try:
        config_map = api.get(CONFIG_MAPS, name, namespace=namespace)
    except ApiError:
        yield unreadable("Kueue's kinds", f"check that {framework} is among integrations.frameworks of Kueue")
        return
    text = "\n".join((config_map.get("data") or {}).values())
    active = {line.strip().lstrip("- ").strip("\"'") for line in text.splitlines() if not line.strip().startswith("#")}
    if framework in active:
        yield CheckResult("Kueue's kinds", "ok", f"{framework} is managed")
    else:
        advice = f"add {framework} to integrations.frameworks in ConfigMap {name} of {namespace}, and restart Kueue"
        yield CheckResult("Kueue's kinds", "missing", f"{framework} is not managed: its jobs bypass the quota", advice)


def check_pipelines(api: ClusterClient) -> Iterator[CheckResult]:
    """Check that Kubeflow Pipelines answers, through the API server's proxy."""
    subject, advice = "Kubeflow Pipelines", "only `podscale pipeline` needs it; `podscale submit` does not"
    try:
        is_healthy = api.is_service_healthy(KFP_HEALTH)
    except ApiError:
        yield unreadable(subject, advice)
        return
    if is_healthy:
        yield CheckResult(subject, "ok", f"answers in namespace {KFP_NAMESPACE}")
        yield from check_retry_defaults(api)
    else:
        yield CheckResult(subject, "note", f"no service ml-pipeline answers in namespace {KFP_NAMESPACE}", advice)


def check_retry_defaults(api: ClusterClient) -> Iterator[CheckResult]:
    """Report what KFP's default retry strategy means for terminated runs and for retries.

    Argo merges `workflowDefaults.spec.templateDefaults.retryStrategy` into every task of every pipeline, the exit
    handler included. KFP 2.17 sets one, KFP 2.16 does not.
    """
    subject, (namespace, name) = "retries of pipelines", WORKFLOW_CONFIG
    try:
        config_map = api.get(CONFIG_MAPS, name, namespace=namespace)
    except ApiNotFound:
        return
    except ApiError:
        yield unreadable(subject, f"check workflowDefaults in ConfigMap {name} of {namespace} (docs/how-to/kfp.md)")
        return
    strategy = _default_retry_strategy(config_map)
    if strategy is None:
        yield CheckResult(
            subject, "ok", "no default retry strategy: the exit handler stops the job of a terminated run"
        )
        return
    policy = str(strategy.get("retryPolicy") or "OnFailure")
    text = (
        f"{name} has the default retryStrategy {policy}: the exit handler of a terminated run does not run, so its job "
        "stops after launch.cluster.launcher_grace_minutes"
    )
    if policy in ("OnError", "OnTransientError"):
        text += "; KFP retries lost pods, but not failed containers: the launcher retries its job itself"
    advice = "to stop a job at once, delete the run, or terminate it and use `podscale stop`; or remove the default"
    yield CheckResult(subject, "note", text, advice)


def _default_retry_strategy(config_map: KubernetesObject) -> KubernetesObject | None:
    """Return the retry strategy of Argo's workflow defaults, which are a key of the ConfigMap or within `config`."""
    data = config_map.get("data") or {}
    defaults: Any = _parse_yaml(data.get("workflowDefaults")) or _parse_yaml(data.get("config")).get("workflowDefaults")
    for key in ("spec", "templateDefaults", "retryStrategy"):
        defaults = defaults.get(key) if isinstance(defaults, dict) else None
    return defaults if isinstance(defaults, dict) else None


def _parse_yaml(text: str | None) -> dict[str, Any]:
    try:
        content = yaml.safe_load(text or "")
    except yaml.YAMLError:
        return {}
    return content if isinstance(content, dict) else {}


def check_monitoring(api: ClusterClient) -> Iterator[CheckResult]:
    """Check that Prometheus can scrape the pods' metrics through an object of the chart."""
    served = [f"{resource.kind} ({resource.api_version})" for resource in MONITOR_KINDS if api.serves(resource)]
    if served:
        yield CheckResult("monitoring", "ok", ", ".join(served))
    else:
        advice = "install the Prometheus Operator, or use managed Prometheus on GKE; training does not need it"
        yield CheckResult("monitoring", "note", "neither PodMonitor nor PodMonitoring", advice)


def _list_deployments(api: ClusterClient) -> Sequence[KubernetesObject] | None:
    try:
        return api.list(DEPLOYMENTS, namespace="")[0]
    except ApiError:
        return None
