"""Checks before the first stage of a run is submitted: what the cluster lacks for all stages, by few requests.

The objects that the document names and no stage creates are volume claims, the service account and the queue.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from podscale.config import RunConfig
from podscale.errors import InputError, InputErrors, combine_errors
from podscale.kubernetes.client import ClusterClient
from podscale.kubernetes.errors import ApiError, ApiNotFound, KindNotServed
from podscale.kubernetes.inventory import unreadable
from podscale.kubernetes.namespace import check_namespace_exists
from podscale.kubernetes.resources import (
    JOB_KINDS,
    KIND_PROVIDERS,
    LOCAL_QUEUES,
    SERVICE_ACCOUNTS,
    VOLUME_CLAIMS,
    conditions_of,
    resource_of,
)
from podscale.kubernetes.run_stage import build_manifests
from podscale.runs.stage_outcomes import StageName
from podscale.util.terminal import CheckResult

STAGES_WITH_RANKS: tuple[StageName, ...] = ("train", "evaluate")


def check_before_submit(
    api: ClusterClient, config: RunConfig, stages: Sequence[StageName], shard_set: str | None = None
) -> None:
    """Raise InputError, or InputErrors for several, if a stage could not run; without it, the first stages would.

    What these credentials may not read is left out. `podscale doctor --cluster` checks more.
    """
    check_namespace_exists(api)
    errors = [error for stage in stages for error in _stage_errors(api, config, stage, shard_set)]
    errors += _object_errors(api, config, queued=not set(STAGES_WITH_RANKS).isdisjoint(stages))
    if errors:
        raise combine_errors(errors, "this run cannot be submitted")  # stages share problems


def _stage_errors(
    api: ClusterClient, config: RunConfig, stage: StageName, shard_set: str | None
) -> Sequence[InputError]:
    """Return the errors if the stage's job cannot be rendered, or the cluster does not have its kind of job."""
    try:
        kind = resource_of(build_manifests(api, config, stage, shard_set).job)
        if kind == JOB_KINDS["job"] or api.serves(kind):
            return ()
        return (_missing_operator_error(config, stage, api.missing_error(kind)),)
    except InputErrors as several:
        return several.errors
    except ApiError:
        return ()  # the kinds of job may not be read
    except InputError as error:
        return (error,)


def _missing_operator_error(config: RunConfig, stage: StageName, missing: KindNotServed) -> InputError:
    return InputError(
        f"the {stage} stage needs a {missing.field}: {missing.problem}",
        field="launch.backend",
        got=config.launch.backend,
        hint=missing.hint,
    )


def check_objects(api: ClusterClient, config: RunConfig) -> None:
    """Raise InputError, or InputErrors for several, if the namespace lacks what a job on the hardware refers to."""
    check_namespace_exists(api)
    if errors := list(_object_errors(api, config, queued=True)):
        raise combine_errors(errors, "this job cannot be submitted")


def _object_errors(api: ClusterClient, config: RunConfig, *, queued: bool) -> Iterator[InputError]:
    """Yield the error of each object that the document names and the namespace lacks."""
    for required in required_objects(api, config, queued=queued):
        if required.result.verdict == "missing":
            advice = required.result.advice
            hint = f"{advice[:1].upper()}{advice[1:]}"
            yield InputError(required.result.found, field=required.field, got=required.name, hint=hint)


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
