"""What is installed in a cluster beside Kubernetes itself: kinds of objects, the controllers behind them, KFP."""

from collections.abc import Iterator, Sequence

from podscale.findings import Finding, Verdict
from podscale.launch.cluster.api import ClusterClient
from podscale.launch.cluster.errors import ApiError
from podscale.launch.cluster.pods import name_of
from podscale.launch.cluster.resources import (
    CONFIG_MAPS,
    DEPLOYMENTS,
    JOB_KINDS,
    PROVIDERS,
    Object,
    Resource,
)

CONTROLLERS = {
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
MONITORS = (
    Resource("monitoring.coreos.com", "v1", "PodMonitor", "podmonitors"),
    Resource("monitoring.googleapis.com", "v1", "PodMonitoring", "podmonitorings"),
)


def kinds(api: ClusterClient, backend: str) -> Iterator[Finding]:
    """Which kinds of job the cluster knows; the one that is wanted must be there."""
    for name, resource in JOB_KINDS.items():
        if name == "job":
            continue
        subject = f"kind {resource.kind}"
        if api.serves(resource):
            yield Finding(subject, "ok", resource.api_version)
            continue
        served = api.served_versions(resource.group)
        found = f"this cluster has {resource.group} {', '.join(served)}" if served else "not installed"
        verdict: Verdict = "missing" if name == backend else "note"
        yield Finding(subject, verdict, found, f"for launch.backend={name}: {PROVIDERS[resource.group].install}")


def controllers(api: ClusterClient, backend: str) -> Iterator[Finding]:
    """Whether the operators behind the wanted kind of job are up."""
    wanted = CONTROLLERS.get(backend, ())
    deployments = _deployments(api)
    if deployments is None:
        if wanted:
            yield Finding("operators", "note", "may not be looked at with these credentials", "ask whether they are up")
        return
    for name in wanted:
        found = next((one for one in deployments if name in name_of(one)), None)
        if found is None:
            yield Finding(
                name, "note", "no Deployment is named like this", "it may run under another name, or not at all"
            )
            continue
        ready = int((found.get("status") or {}).get("readyReplicas") or 0)
        where = found["metadata"]["namespace"]
        yield Finding(
            name,
            "ok" if ready else "missing",
            f"{ready} ready in namespace {where}, {_image(found)}",
            "" if ready else f"kubectl describe pods -n {where}",
        )


def init_container(api: ClusterClient) -> Iterator[Finding]:
    """The training operator gives workers of jobs with a master an init container that restricted admission refuses."""
    for found in _deployments(api) or ():
        if name_of(found) == "training-operator" and "pytorch-init-container-template-file" not in str(found["spec"]):
            yield Finding(
                "init container",
                "note",
                "the training operator's own has no security context, so PyTorchJobs with a Master are refused here",
                "Podscale's have workers alone and run; for others give the operator "
                "--pytorch-init-container-template-file",
            )


def managed_by_kueue(api: ClusterClient, backend: str) -> Iterator[Finding]:
    """Kueue's default configuration leaves PyTorchJob and JAXJob alone: such a job would pass by the quota."""
    namespace, name = KUEUE_CONFIG
    try:
        found = api.get(CONFIG_MAPS, name, namespace=namespace)
    except ApiError:
        advice = f"see that {KUEUE_NAMES.get(backend, backend)} is among integrations.frameworks of Kueue"
        yield Finding("Kueue's kinds", "note", "its configuration may not be looked at with these credentials", advice)
        return
    text = "\n".join((found.get("data") or {}).values())
    active = {line.strip().lstrip("- ").strip("\"'") for line in text.splitlines() if not line.strip().startswith("#")}
    wanted = KUEUE_NAMES.get(backend, "")
    if wanted in active:
        yield Finding("Kueue's kinds", "ok", f"{wanted} is managed")
    else:
        advice = f"add {wanted} to integrations.frameworks in ConfigMap {name} of {namespace}, and restart Kueue"
        yield Finding("Kueue's kinds", "missing", f"{wanted} is not managed: the job would pass by the quota", advice)


def pipelines(api: ClusterClient) -> Iterator[Finding]:
    """Whether Kubeflow Pipelines answers, through the API server's proxy."""
    subject, advice = "Kubeflow Pipelines", "only `podscale pipeline` needs it; `podscale submit` does not"
    try:
        answers = api.healthy(KFP_HEALTH)
    except ApiError:
        yield Finding(subject, "note", "may not be asked with these credentials", advice)
        return
    if answers:
        yield Finding(subject, "ok", "answers in namespace kubeflow")
    else:
        yield Finding(subject, "note", "no service ml-pipeline that answers in namespace kubeflow", advice)


def monitoring(api: ClusterClient) -> Iterator[Finding]:
    """Whether anything could scrape the pods' metrics by an object of the chart."""
    found = [resource for resource in MONITORS if api.serves(resource)]
    if found:
        yield Finding("monitoring", "ok", ", ".join(f"{one.kind} ({one.api_version})" for one in found))
    else:
        advice = "install the Prometheus Operator, or use managed Prometheus on GKE; training runs without"
        yield Finding("monitoring", "note", "neither PodMonitor nor PodMonitoring", advice)


def _deployments(api: ClusterClient) -> Sequence[Object] | None:
    try:
        return api.list(DEPLOYMENTS, namespace="")[0]
    except ApiError:
        return None


def _image(deployment: Object) -> str:
    return str(deployment["spec"]["template"]["spec"]["containers"][0]["image"])
