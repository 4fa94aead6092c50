"""Submit a job once per run id and stage: after any retry there is one job, and it is of this document.

The job's name is the lock: the API server lets one of two submitters create it, and the other adopts that job. Objects
that the job needs (NetworkPolicy, TrainingRuntime) are created before it and deleted with it.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from podscale.errors import InputError, PodscaleError
from podscale.kubernetes.client import ClusterClient, delete_job, wait_until_gone
from podscale.kubernetes.errors import ApiAlreadyExists, ApiError, KindNotServed
from podscale.kubernetes.job_spec import IDENTITY_ANNOTATION, NAME_LABEL, RUN_LABEL, STAGE_LABEL
from podscale.kubernetes.job_state import read_job_state
from podscale.kubernetes.pod_state import name_of
from podscale.kubernetes.render import JobManifests
from podscale.kubernetes.resources import JOB_KINDS, KubernetesObject, ResourceKind, resource_of
from podscale.kubernetes.retry import Notify

MANIFEST_ANNOTATION = "podscale.dev/manifest"
"""Annotation: what an object was made from. The API server fills in defaults, so the object itself does not tell."""
IDENTITY_LABELS = (NAME_LABEL, RUN_LABEL, STAGE_LABEL)


def prepare_owned_objects(api: ClusterClient, objects: Iterable[KubernetesObject]) -> Sequence[KubernetesObject]:
    """Create missing objects, replace those of an earlier job, and return the new ones.

    For a job that does not exist yet.

    Raises:
        InputError: An object of that name belongs to another job.
    """
    return [companion for companion in map(_annotate_manifest, objects) if _prepare_one(api, companion)]


def set_owner(api: ClusterClient, job: KubernetesObject, objects: Iterable[KubernetesObject]) -> None:
    """Make the job the owner of its objects, so that they are deleted with it, and before it is gone.

    Raises:
        InputError: An object of that name belongs to another job.
    """
    resource = resource_of(job)
    owner = {
        "apiVersion": resource.api_version,
        "kind": resource.kind,
        "name": name_of(job),
        "uid": job["metadata"]["uid"],
        "blockOwnerDeletion": True,
    }
    for companion in map(_annotate_manifest, objects):
        owned = {"metadata": {"ownerReferences": [owner]}}
        found = api.get_or_none(resource_of(companion), name_of(companion))
        if found is None:
            _create_if_absent(api, {**companion, "metadata": {**companion["metadata"], **owned["metadata"]}})
            continue
        _check_created_for_stage(found, companion)
        api.patch(resource_of(companion), name_of(companion), owned)


def remove_owned_objects(api: ClusterClient, objects: Iterable[KubernetesObject]) -> None:
    """Delete the objects that were created for a refused job."""
    for companion in objects:
        resource = resource_of(companion)
        found = api.get_or_none(resource, name_of(companion))
        if found is not None:
            delete_job(api, resource, name_of(companion), str(found["metadata"]["uid"]))


def _annotate_manifest(companion: KubernetesObject) -> KubernetesObject:
    digest = hashlib.sha256(json.dumps(companion, sort_keys=True).encode()).hexdigest()
    metadata = companion["metadata"]
    return {
        **companion,
        "metadata": {**metadata, "annotations": {**metadata.get("annotations", {}), MANIFEST_ANNOTATION: digest}},
    }


def _prepare_one(api: ClusterClient, companion: KubernetesObject) -> bool:
    """Whether it was made here."""
    if _create_if_absent(api, companion):
        return True
    resource, name = resource_of(companion), name_of(companion)
    found = api.get_or_none(resource, name)
    if found is not None:
        _check_created_for_stage(found, companion)
        leaving = "deletionTimestamp" in found["metadata"]
        if (
            not leaving
            and _annotations_of(found).get(MANIFEST_ANNOTATION) == _annotations_of(companion)[MANIFEST_ANNOTATION]
        ):
            return False
        delete_job(api, resource, name, str(found["metadata"]["uid"]))
        wait_until_gone(api, resource, name, str(found["metadata"]["uid"]))
    return _create_if_absent(api, companion)


def _create_if_absent(api: ClusterClient, companion: KubernetesObject) -> bool:
    """False where one of that name is there."""
    resource = resource_of(companion)
    try:
        api.create(resource, companion)
    except ApiAlreadyExists:
        return False
    except KindNotServed:
        raise api.missing_error(resource) from None
    return True


def _check_created_for_stage(found: KubernetesObject, companion: KubernetesObject) -> None:
    """Raises InputError where the object was not made for this stage of this run."""
    labels, wanted = found["metadata"].get("labels") or {}, companion["metadata"]["labels"]
    if any(labels.get(name) != wanted[name] for name in IDENTITY_LABELS):
        raise InputError(
            "exists and was not made for this job, which needs one of that name",
            field=f"{companion['kind']} {name_of(companion)}",
            hint="Choose another run.id, or delete it.",
        )


def _annotations_of(thing: KubernetesObject) -> dict[str, str]:
    return thing["metadata"].get("annotations") or {}


LAUNCHER_ANNOTATION, PIPELINE_LAUNCHER = "podscale.dev/launcher", "pipeline"
"""Annotation of jobs whose launcher is a task of a pipeline."""
MAX_RACES = 5
"""How often a job may appear or vanish between two requests before something is wrong."""


@dataclass(frozen=True)
class Submission:
    """Job of the stage, and what was done to get it."""

    action: Literal["created", "adopted", "finished"]
    job: KubernetesObject
    resource: ResourceKind


def submit_job(api: ClusterClient, manifests: JobManifests, notify: Notify) -> Submission:
    """Create the job or find an existing one: adopt a running one, keep a successful one, replace a failed one.

    Raises:
        InputError: The server refuses the job, or another document ran under this id.
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
                set_owner(api, found, manifests.owned_objects)  # the first submitter may have died before it
                return Submission("adopted", found, resource)
        try:
            return Submission("created", create_job(api, manifests), resource)
        except ApiAlreadyExists:
            continue  # another submitter was faster
    name = f"{resource.kind} {name_of(manifests.job)}"
    raise PodscaleError("appears and vanishes", field=name, hint="Another program may manage it.")


def create_job(api: ClusterClient, manifests: JobManifests) -> KubernetesObject:
    """Create the owned objects, dry-run the job, create it, and make it their owner.

    Nothing new remains if the job is refused.

    Raises:
        ApiAlreadyExists: Another submitter was faster.
    """
    resource = resource_of(manifests.job)
    made = prepare_owned_objects(api, manifests.owned_objects)
    try:
        api.create(resource, manifests.job, dry_run=True)
        job = api.create(resource, manifests.job)
    except ApiAlreadyExists:
        raise
    except KindNotServed:
        remove_owned_objects(api, made)
        raise api.missing_error(resource) from None
    except PodscaleError:
        remove_owned_objects(api, made)
        raise
    set_owner(api, job, manifests.owned_objects)
    return job


def dry_run_job(api: ClusterClient, manifests: JobManifests) -> None:
    """Have the server check every object without effect.

    A job that needs its owned objects first can only be checked by submitting it.

    Raises:
        InputError: The server refuses an object.
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
    """Return the command that stops this job."""
    labels = job["metadata"].get("labels") or {}
    run, stage = labels.get(RUN_LABEL, name_of(job)), labels.get(STAGE_LABEL, "train")
    return f"podscale stop {run}" + ("" if stage == "train" else f" --stage {stage}")


def identity_of_job(job: KubernetesObject) -> str | None:
    """Return the identity of a job; None if Podscale did not create it."""
    identity = (job["metadata"].get("annotations") or {}).get(IDENTITY_ANNOTATION)
    return None if identity is None else str(identity)


def check_same_document(found: KubernetesObject, wanted: KubernetesObject) -> None:
    """Raise InputError if the existing job is of another document."""
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
    """Raise InputError if a job of another kind still runs the same stage of the same run.

    Kinds that the cluster does not serve, or that these credentials may not list, are skipped.
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
