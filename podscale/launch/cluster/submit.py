"""Submitting is idempotent by run id and stage: whatever happens, there is one job, and it is of this document.

The name is the lock: the API server lets one of two submitters create it, and the other finds the job of the first.
"""

from dataclasses import dataclass
from typing import Literal

from podscale.errors import InputError, PodscaleError
from podscale.launch.cluster import companions
from podscale.launch.cluster.api import ClusterClient
from podscale.launch.cluster.errors import ApiAlreadyExists, ApiError, KindNotServed
from podscale.launch.cluster.patience import Notify
from podscale.launch.cluster.pods import name_of
from podscale.launch.cluster.removal import delete_job, wait_until_gone
from podscale.launch.cluster.resources import JOB_KINDS, KubernetesObject, ResourceKind, resource_of
from podscale.launch.cluster.state import read_job_state
from podscale.launch.jobspec import IDENTITY_ANNOTATION, RUN_LABEL, STAGE_LABEL
from podscale.launch.render import JobManifests

LAUNCHER_ANNOTATION, PIPELINE_LAUNCHER = "podscale.dev/launcher", "pipeline"
"""Annotation of jobs whose launcher is a task of a pipeline."""
MAX_RACES = 5
"""How often a job may appear or vanish between two requests before something is wrong."""


@dataclass(frozen=True)
class Submission:
    """The job that carries out the stage, and what was done to get it."""

    action: Literal["created", "adopted", "finished"]
    job: KubernetesObject
    resource: ResourceKind


def submit_job(api: ClusterClient, manifests: JobManifests, notify: Notify) -> Submission:
    """Creates the job, or finds the one that is there: running ones are adopted, successful ones are left alone,
    failed ones are replaced.

    Raises InputError: the server refuses it, or another document has run under this id.
    """
    resource = resource_of(manifests.job)
    check_no_other_kind(api, manifests.job, resource)
    for _ in range(MAX_RACES):
        found = _find_job(api, resource, name_of(manifests.job))
        if found is not None:
            check_same_document(found, manifests.job)
            state = read_job_state(found)
            if state.phase == "succeeded":
                return Submission("finished", found, resource)
            if state.phase not in ("failed", "stopped") or not _make_room(api, resource, found, state.phase, notify):
                companions.set_owner(api, found, manifests.owned_objects)  # the first submitter may have died before it
                return Submission("adopted", found, resource)
        try:
            return Submission("created", create_job(api, manifests), resource)
        except ApiAlreadyExists:
            continue  # another submitter was faster
    name = f"{resource.kind} {name_of(manifests.job)}"
    raise PodscaleError("appears and vanishes", field=name, hint="Another program may manage it.")


def create_job(api: ClusterClient, manifests: JobManifests) -> KubernetesObject:
    """Creates the companions, tries the job without effect, creates it, and makes it the companions' owner.

    Nothing new is left behind where the job is refused. Raises AlreadyExists where another submitter was faster.
    """
    resource = resource_of(manifests.job)
    made = companions.prepare_owned_objects(api, manifests.owned_objects)
    try:
        api.create(resource, manifests.job, dry_run=True)
        job = api.create(resource, manifests.job)
    except ApiAlreadyExists:
        raise
    except KindNotServed:
        companions.remove_owned_objects(api, made)
        raise api.missing_error(resource) from None
    except PodscaleError:
        companions.remove_owned_objects(api, made)
        raise
    companions.set_owner(api, job, manifests.owned_objects)
    return job


def dry_run_job(api: ClusterClient, manifests: JobManifests) -> None:
    """Has the server check everything without effect.

    Raises InputError with what it refuses. A job that needs its companions first can only be checked by submitting.
    """
    resource = resource_of(manifests.job)
    for companion in manifests.owned_objects:
        try:
            api.create(resource_of(companion), companion, dry_run=True)
        except ApiAlreadyExists:
            continue
    try:
        if manifests.job["kind"] != "TrainJob" or not manifests.owned_objects:  # its runtime must exist first
            api.create(resource, manifests.job, dry_run=True)
        elif not api.serves(resource):
            raise api.missing_error(resource)
    except ApiAlreadyExists:
        check_same_document(api.get(resource, name_of(manifests.job)), manifests.job)
    except KindNotServed:
        raise api.missing_error(resource) from None


def stop_command(job: KubernetesObject) -> str:
    """What to type to end this job."""
    labels = job["metadata"].get("labels") or {}
    run, stage = labels.get(RUN_LABEL, name_of(job)), labels.get(STAGE_LABEL, "train")
    return f"podscale stop {run}" + ("" if stage == "train" else f" --stage {stage}")


def identity_of_job(job: KubernetesObject) -> str | None:
    """What makes two jobs the same job; None where Podscale did not make it."""
    identity = (job["metadata"].get("annotations") or {}).get(IDENTITY_ANNOTATION)
    return None if identity is None else str(identity)


def check_same_document(found: KubernetesObject, wanted: KubernetesObject) -> None:
    """Raises InputError where the job that is there is not of the document that is to be carried out."""
    name, identity = f"{found['kind']} {name_of(found)}", identity_of_job(found)
    if identity is None:
        raise InputError("exists and was not made by Podscale", field=name, hint="Choose another run.id, or delete it.")
    if identity != wanted["metadata"]["annotations"][IDENTITY_ANNOTATION]:
        raise InputError(
            "belongs to another document: options that change the result, or the shard set, differ",
            field=name,
            got=identity,
            hint=f"Choose another run.id, or remove that one with `{stop_command(found)} --delete`",
        )


def check_no_other_kind(api: ClusterClient, wanted: KubernetesObject, resource: ResourceKind) -> None:
    """Raises InputError where a job of another kind still carries out the same stage of the same run.

    Kinds that the cluster lacks or hides from us are passed over: whoever may not see them does not use them.
    """
    for kind in JOB_KINDS.values():
        try:
            found = api.get_or_none(kind, name_of(wanted)) if kind != resource else None
        except ApiError as error:
            if error.status not in (403, 404):
                raise
            continue
        if found is not None and not read_job_state(found).is_finished:
            raise InputError(
                "already carries this out",
                field=f"{found['kind']} {name_of(found)}",
                hint=f"Adopt it with the same launch.backend, or end it with `{stop_command(found)}`",
            )


def _find_job(api: ClusterClient, resource: ResourceKind, name: str) -> KubernetesObject | None:
    try:
        return api.get_or_none(resource, name)
    except KindNotServed:
        raise api.missing_error(resource) from None


def _make_room(api: ClusterClient, resource: ResourceKind, job: KubernetesObject, phase: str, notify: Notify) -> bool:
    """Makes room for a new job where the old one failed or is being deleted; False where it is only suspended."""
    name, uid = name_of(job), str(job["metadata"]["uid"])
    if "deletionTimestamp" not in job["metadata"]:
        if phase == "stopped":
            return False
        notify(f"{job['kind']} {name} failed before; it is replaced, and goes on from the newest checkpoint")
        delete_job(api, resource, name, uid)
    wait_until_gone(api, resource, name, uid)
    return True
