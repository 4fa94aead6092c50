"""Objects of the namespace that a run document names and no stage creates: volume claims, service account, queue."""

from collections.abc import Iterator
from dataclasses import dataclass

from podscale.config import RunConfig
from podscale.errors import InputError
from podscale.kubernetes.client import ClusterClient
from podscale.kubernetes.errors import ApiError, ApiNotFound
from podscale.kubernetes.inventory import unreadable
from podscale.kubernetes.resources import (
    KIND_PROVIDERS,
    LOCAL_QUEUES,
    NAMESPACES,
    SERVICE_ACCOUNTS,
    VOLUME_CLAIMS,
    conditions_of,
)
from podscale.util.terminal import CheckResult


@dataclass(frozen=True)
class RequiredObject:
    """Object that an option of the run document names, and the result of its check."""

    field: str
    name: str
    result: CheckResult


def required_objects(api: ClusterClient, config: RunConfig, *, queued: bool = True) -> Iterator[RequiredObject]:
    """Yield every object that the document names; `queued` includes the queue, which only ranks wait in."""
    cluster = config.launch.cluster
    claims = [("launch.cluster.workspace_claim", cluster.workspace_claim)]
    claims += [("launch.cluster.volumes", volume.claim) for volume in cluster.volumes]
    for field, claim in claims:
        if claim is not None:
            yield RequiredObject(field, claim, _check_claim(api, field, claim, config.launch.nodes))
    if (account := cluster.service_account) is not None:
        yield RequiredObject("launch.cluster.service_account", account, _check_service_account(api, account))
    if queued and (queue := cluster.queue) is not None:
        yield RequiredObject("launch.cluster.queue", queue, _check_queue(api, queue))


def check_namespace_exists(api: ClusterClient) -> None:
    """Raise InputError if the namespace does not exist; credentials that may not read it are no error."""
    try:
        api.get(NAMESPACES, api.namespace)
    except ApiNotFound:
        raise InputError(
            "there is no such namespace",
            field="launch.cluster.namespace",
            got=api.namespace,
            hint=f"Name another one with --namespace, or create it: `kubectl create namespace {api.namespace}`",
        ) from None
    except ApiError:
        return


def _check_claim(api: ClusterClient, field: str, claim: str, nodes: int) -> CheckResult:
    subject = f"claim {claim}"
    try:
        volume_claim = api.get(VOLUME_CLAIMS, claim)
    except ApiNotFound:
        problem = f"namespace {api.namespace} has no such PersistentVolumeClaim"
        return CheckResult(subject, "missing", problem, f"create it (the chart can), or name another one in {field}")
    except ApiError:
        return unreadable(subject, "check that it is bound")
    phase = (volume_claim.get("status") or {}).get("phase")
    modes = volume_claim["spec"].get("accessModes") or []
    if phase == "Lost":
        return CheckResult(subject, "missing", "its volume is lost", "restore the volume, or name another claim")
    if nodes > 1 and "ReadWriteMany" not in modes:
        advice = "pods on several nodes need ReadWriteMany (Filestore, a bucket, NFS)"
        return CheckResult(subject, "note", f"{phase}, {', '.join(modes)}", advice)
    return CheckResult(subject, "ok", f"{phase}, {', '.join(modes)}")


def _check_service_account(api: ClusterClient, name: str) -> CheckResult:
    subject = f"service account {name}"
    try:
        api.get(SERVICE_ACCOUNTS, name)
    except ApiNotFound:
        problem, field = f"namespace {api.namespace} has no such ServiceAccount", "launch.cluster.service_account"
        return CheckResult(subject, "missing", problem, f"create it (the chart does), or name another one in {field}")
    except ApiError:
        return unreadable(subject, "check that it exists")
    return CheckResult(subject, "ok", "exists")


def _check_queue(api: ClusterClient, name: str) -> CheckResult:
    """Check a LocalQueue. Without Kueue nothing reads the job's queue, so the job would start at once, unlimited."""
    subject = f"queue {name}"
    versions = api.served_versions(LOCAL_QUEUES.group)
    if not versions:
        provider = KIND_PROVIDERS[LOCAL_QUEUES.group]
        advice = (
            f"remove launch.cluster.queue, or install {provider.name} {provider.version} or newer: {provider.install}"
        )
        return CheckResult(subject, "missing", "this cluster has no Kueue, which would hold the job back", advice)
    if LOCAL_QUEUES.version not in versions:
        found = f"Kueue serves only {', '.join(versions)}, so the queue was not checked"
        return CheckResult(subject, "note", found, str(api.missing_error(LOCAL_QUEUES).hint))
    try:
        queue = api.get(LOCAL_QUEUES, name)
    except ApiNotFound:
        problem = f"namespace {api.namespace} has no such LocalQueue"
        return CheckResult(subject, "missing", problem, f"`kubectl get localqueues -n {api.namespace}` lists them")
    except ApiError:
        return unreadable(subject, "ask the administrator of Kueue")
    active = conditions_of(queue).get("Active", {})
    if active.get("status") == "False":
        advice = "its ClusterQueue must exist, have flavors, and not be stopped"
        return CheckResult(subject, "missing", str(active.get("message") or "not active"), advice)
    return CheckResult(subject, "ok", f"active, of ClusterQueue {queue['spec'].get('clusterQueue')}")
