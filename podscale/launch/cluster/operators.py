"""What is installed in a cluster beside Kubernetes itself: kinds of objects, the controllers behind them, KFP."""

from collections.abc import Iterator, Sequence

from podscale.launch.cluster.api import ClusterClient
from podscale.launch.cluster.errors import ApiError
from podscale.launch.cluster.pods import name_of
from podscale.launch.cluster.resources import (
    CONFIG_MAPS,
    DEPLOYMENTS,
    JOB_KINDS,
    KIND_PROVIDERS,
    KubernetesObject,
    ResourceKind,
)
from podscale.util.terminal import CheckResult, CheckStatus

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
    """Which kinds of job the cluster knows; the one that is wanted must be there."""
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
    """Whether the operators behind the wanted kind of job are up."""
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
    """The training operator gives workers of jobs with a master an init container that restricted admission refuses."""
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
    """Kueue's default configuration leaves PyTorchJob and JAXJob alone: such a job would pass by the quota."""
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
    """Whether Kubeflow Pipelines answers, through the API server's proxy."""
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
    """Whether anything could scrape the pods' metrics by an object of the chart."""
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
