"""Submitting is idempotent by run id and stage: whatever happens, there is one job, and it is of this document.

The name is the lock: the API server lets one of two submitters create it, and the other finds the job of the first.
"""

from dataclasses import dataclass
from typing import Literal

from podscale.errors import InputError, PodscaleError
from podscale.launch.cluster import companions
from podscale.launch.cluster import state as states
from podscale.launch.cluster.api import Api
from podscale.launch.cluster.errors import AlreadyExists, Missing, Refused
from podscale.launch.cluster.patience import Tell
from podscale.launch.cluster.pods import name_of
from podscale.launch.cluster.removal import delete, wait_until_gone
from podscale.launch.cluster.resources import JOB_KINDS, RUN_LABEL, STAGE_LABEL, Object, Resource, resource_of
from podscale.launch.jobspec import IDENTITY
from podscale.launch.render import Manifests

LAUNCHER, PIPELINE = "podscale.dev/launcher", "pipeline"
"""Annotation of jobs whose launcher is a task of a pipeline."""
RACES = 5
"""How often a job may appear or vanish between two requests before something is wrong."""


@dataclass(frozen=True)
class Submission:
    """The job that carries out the stage, and what was done to get it."""

    action: Literal["created", "adopted", "finished"]
    job: Object
    resource: Resource


def submit(api: Api, manifests: Manifests, tell: Tell) -> Submission:
    """Creates the job, or finds the one that is there: running ones are adopted, successful ones are left alone,
    failed ones are replaced.

    Raises InputError: the server refuses it, or another document has run under this id.
    """
    resource = resource_of(manifests.job)
    refuse_other_kinds(api, manifests.job, resource)
    for _ in range(RACES):
        found = _find(api, resource, name_of(manifests.job))
        if found is not None:
            refuse_other_document(found, manifests.job)
            state = states.read(found)
            if state.phase == "succeeded":
                return Submission("finished", found, resource)
            if state.phase not in ("failed", "stopped") or not _clear(api, resource, found, state.phase, tell):
                companions.own(api, found, manifests.companions)  # the first submitter may have died before it
                return Submission("adopted", found, resource)
        try:
            return Submission("created", create(api, manifests), resource)
        except AlreadyExists:
            continue  # another submitter was faster
    name = f"{resource.kind} {name_of(manifests.job)}"
    raise PodscaleError("appears and vanishes", field=name, hint="Another program may manage it.")


def create(api: Api, manifests: Manifests) -> Object:
    """Creates the companions, tries the job without effect, creates it, and makes it the companions' owner.

    Nothing new is left behind where the job is refused. Raises AlreadyExists where another submitter was faster.
    """
    resource = resource_of(manifests.job)
    made = companions.prepare(api, manifests.companions)
    try:
        api.create(resource, manifests.job, dry_run=True)
        job = api.create(resource, manifests.job)
    except AlreadyExists:
        raise
    except Missing:
        companions.remove(api, made)
        raise api.missing(resource) from None
    except PodscaleError:
        companions.remove(api, made)
        raise
    companions.own(api, job, manifests.companions)
    return job


def check(api: Api, manifests: Manifests) -> None:
    """Has the server check everything without effect.

    Raises InputError with what it refuses. A job that needs its companions first can only be checked by submitting.
    """
    resource = resource_of(manifests.job)
    for companion in manifests.companions:
        try:
            api.create(resource_of(companion), companion, dry_run=True)
        except AlreadyExists:
            continue
    try:
        if manifests.job["kind"] != "TrainJob" or not manifests.companions:  # its runtime must exist first
            api.create(resource, manifests.job, dry_run=True)
        elif not api.has(resource):
            raise api.missing(resource)
    except AlreadyExists:
        refuse_other_document(api.get(resource, name_of(manifests.job)), manifests.job)
    except Missing:
        raise api.missing(resource) from None


def stop_command(job: Object) -> str:
    """What to type to end this job."""
    labels = job["metadata"].get("labels") or {}
    run, stage = labels.get(RUN_LABEL, name_of(job)), labels.get(STAGE_LABEL, "train")
    return f"podscale stop {run}" + ("" if stage == "train" else f" --stage {stage}")


def identity_of(job: Object) -> str | None:
    """What makes two jobs the same job; None where Podscale did not make it."""
    identity = (job["metadata"].get("annotations") or {}).get(IDENTITY)
    return None if identity is None else str(identity)


def refuse_other_document(found: Object, wanted: Object) -> None:
    """Raises InputError where the job that is there is not of the document that is to be carried out."""
    name, identity = f"{found['kind']} {name_of(found)}", identity_of(found)
    if identity is None:
        raise InputError("exists and was not made by Podscale", field=name, hint="Choose another run.id, or delete it.")
    if identity != wanted["metadata"]["annotations"][IDENTITY]:
        raise InputError(
            "belongs to another document: options that change the result, or the shard set, differ",
            field=name,
            got=identity,
            hint=f"Choose another run.id, or remove that one with `{stop_command(found)} --delete`",
        )


def refuse_other_kinds(api: Api, wanted: Object, resource: Resource) -> None:
    """Raises InputError where a job of another kind still carries out the same stage of the same run.

    Kinds that the cluster lacks or hides from us are passed over: whoever may not see them does not use them.
    """
    for kind in JOB_KINDS.values():
        try:
            found = api.find(kind, name_of(wanted)) if kind != resource else None
        except Refused as error:
            if error.status not in (403, 404):
                raise
            continue
        if found is not None and not states.read(found).ended:
            raise InputError(
                "already carries this out",
                field=f"{found['kind']} {name_of(found)}",
                hint=f"Adopt it with the same launch.backend, or end it with `{stop_command(found)}`",
            )


def _find(api: Api, resource: Resource, name: str) -> Object | None:
    try:
        return api.find(resource, name)
    except Missing:
        raise api.missing(resource) from None


def _clear(api: Api, resource: Resource, job: Object, phase: str, tell: Tell) -> bool:
    """Makes room for a new job where the old one failed or is being deleted; False where it is only suspended."""
    name, uid = name_of(job), str(job["metadata"]["uid"])
    if "deletionTimestamp" not in job["metadata"]:
        if phase == "stopped":
            return False
        tell(f"{job['kind']} {name} failed before; it is replaced, and goes on from the newest checkpoint")
        delete(api, resource, name, uid)
    wait_until_gone(api, resource, name, uid)
    return True
