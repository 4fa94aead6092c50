"""Submit a job once per run id and stage: after any retry there is one job, and it belongs to this run document.

The job's name is the lock: the API server lets one of two submitters create it, and the other adopts that job. Its
owned objects (NetworkPolicy, TrainingRuntime) are created before the job and deleted with it.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from podscale.errors import InputError, PodscaleError
from podscale.kubernetes.client import ClusterClient, delete_object, wait_until_gone
from podscale.kubernetes.errors import ApiAlreadyExists, ApiError, KindNotServed
from podscale.kubernetes.job_spec import IDENTITY_ANNOTATION, NAME_LABEL, RUN_LABEL, STAGE_LABEL
from podscale.kubernetes.job_state import JobPhase, pod_selector, read_job_state
from podscale.kubernetes.pod_state import trim_pod
from podscale.kubernetes.render import JobManifests
from podscale.kubernetes.resources import (
    JOB_KINDS,
    PODS,
    KubernetesObject,
    annotations_of,
    is_being_deleted,
    labels_of,
    name_of,
    resource_of,
    title_of,
    uid_of,
)
from podscale.kubernetes.retry import Notify

MANIFEST_ANNOTATION = "podscale.dev/manifest"
"""Annotation with the hash of an owned object's manifest, because the API server adds defaults to the object itself."""
MAX_RACES = 5
"""Attempts to find or create a job that other clients change at the same time."""


@dataclass(frozen=True)
class Submission:
    """Job of the stage, and how it was obtained."""

    action: Literal["created", "adopted", "finished"]
    job: KubernetesObject


def submit_job(
    api: ClusterClient, manifests: JobManifests, notify: Notify, check: Callable[[], object] = lambda: None
) -> Submission:
    """Create the job or find an existing one: adopt a running one, keep a successful one, replace a failed one.

    Args:
        check: called before the job is created, but not if one is adopted; raises if it must not be created.

    Raises:
        InputError: the server refuses the job, or another document ran under this id.
    """
    check_no_other_kind(api, manifests.job)
    for _ in range(MAX_RACES):
        existing = _find_job(api, manifests.job)
        if existing is not None:
            check_same_document(existing, manifests.job)
            phase = _read_phase(api, existing)
            if phase == "succeeded":
                return Submission("finished", existing)
            if phase != "failed" and not is_being_deleted(existing):
                set_owner(api, existing, manifests.owned_objects)  # the submitter may have been killed before it did
                return Submission("adopted", existing)
        check()
        if existing is not None:
            _remove_job(api, existing, notify)
        try:
            return Submission("created", create_job(api, manifests))
        except ApiAlreadyExists:
            continue  # another submitter was faster
    raise PodscaleError(
        f"was created and deleted by other clients {MAX_RACES} times",
        field=title_of(manifests.job),
        hint="Another program may manage it.",
    )


def create_job(api: ClusterClient, manifests: JobManifests) -> KubernetesObject:
    """Dry-run the job, create the owned objects and the job, and make the job their owner.

    A refused job leaves no object. A TrainJob is dry-run after its runtime exists, because the server looks it up.
    Raises ApiAlreadyExists if another submitter was faster.
    """
    resource = resource_of(manifests.job)
    if not _needs_runtime(manifests):
        _create(api, manifests.job, dry_run=True)
    created = prepare_owned_objects(api, manifests.owned_objects)
    try:
        if _needs_runtime(manifests):
            api.create(resource, manifests.job, dry_run=True)
        job = api.create(resource, manifests.job)
    except ApiAlreadyExists:
        raise  # the owned objects belong to the job of the other submitter now
    except PodscaleError as error:
        with suppress(PodscaleError):  # the next submission uses or replaces what is left
            _remove_owned_objects(api, created)
        if isinstance(error, KindNotServed):
            raise api.missing_error(resource) from None
        raise
    set_owner(api, job, manifests.owned_objects)
    return job


def dry_run_job(api: ClusterClient, manifests: JobManifests) -> None:
    """Check every object by a server-side dry run. Raises InputError if the server refuses one.

    The server checks a TrainJob only after its runtime exists, so here only its kind is checked.
    """
    resource = resource_of(manifests.job)
    for manifest in manifests.owned_objects:
        with suppress(ApiAlreadyExists):
            api.create(resource_of(manifest), manifest, dry_run=True)
    try:
        if not _needs_runtime(manifests):
            api.create(resource, manifests.job, dry_run=True)
        elif not api.serves(resource):
            raise api.missing_error(resource)
    except ApiAlreadyExists:
        check_same_document(api.get(resource, name_of(manifests.job)), manifests.job)
    except KindNotServed:
        raise api.missing_error(resource) from None


def _needs_runtime(manifests: JobManifests) -> bool:
    """Return True if the server refuses the job until an owned object exists: a TrainJob and its runtime."""
    return manifests.job["kind"] == "TrainJob" and bool(manifests.owned_objects)


def stop_command(job: KubernetesObject) -> str:
    """Return the command that stops a job, for error messages."""
    labels = labels_of(job)
    run, stage = labels.get(RUN_LABEL, name_of(job)), labels.get(STAGE_LABEL, "train")
    return f"podscale stop {run}" + ("" if stage == "train" else f" --stage {stage}")


def identity_of_job(job: KubernetesObject) -> str | None:
    """Return the identity of a job (see `job_spec.job_identity`); None if Podscale did not create it."""
    return annotations_of(job).get(IDENTITY_ANNOTATION)


def check_same_document(existing: KubernetesObject, job: KubernetesObject) -> None:
    """Raise InputError if the existing job belongs to another run document, or to another program."""
    identity = identity_of_job(existing)
    if identity is None:
        hint = "Choose another run.id, or delete it."
        raise InputError("exists and was not created by Podscale", field=title_of(existing), hint=hint)
    if identity != identity_of_job(job):
        raise InputError(
            "belongs to another document: options that change the result, or the shard set, differ",
            field=title_of(existing),
            got=identity,
            hint=f"Choose another run.id, or remove that one with `{stop_command(existing)} --delete`",
        )


def check_no_other_kind(api: ClusterClient, job: KubernetesObject) -> None:
    """Raise InputError if a job of another kind runs the same stage of the same run.

    Kinds that the cluster does not serve, or that these credentials may not list, are skipped.
    """
    for kind in JOB_KINDS.values():
        try:
            existing = api.get_or_none(kind, name_of(job)) if kind.kind != job["kind"] else None
        except ApiError as error:
            if error.status not in (403, 404):
                raise
            continue
        if existing is not None and not read_job_state(existing).is_finished:
            raise InputError(
                "already runs this stage",
                field=title_of(existing),
                hint=f"Adopt it with the same launch.backend, or stop it with `{stop_command(existing)}`",
            )


def _find_job(api: ClusterClient, job: KubernetesObject) -> KubernetesObject | None:
    try:
        return api.get_or_none(resource_of(job), name_of(job))
    except KindNotServed:
        raise api.missing_error(resource_of(job)) from None


def _read_phase(api: ClusterClient, job: KubernetesObject) -> JobPhase:
    """Return the phase; of a successful job also by its pods, which report whether the stage is done."""
    state = read_job_state(job)
    if state.phase == "succeeded":
        pods, _ = api.list(PODS, labels=pod_selector(job), keep=trim_pod)
        state = read_job_state(job, pods)
    return state.phase


def _remove_job(api: ClusterClient, job: KubernetesObject, notify: Notify) -> None:
    """Delete a failed job, unless that was requested before, and wait until it is gone."""
    if not is_being_deleted(job):
        notify(f"{title_of(job)} failed before; it is replaced, and resumes from the newest checkpoint")
        delete_object(api, job)
    wait_until_gone(api, job)


def prepare_owned_objects(api: ClusterClient, objects: Iterable[KubernetesObject]) -> Sequence[KubernetesObject]:
    """Create missing objects, replace those of an earlier job, and return the created ones.

    Call it before the job is created. Raises InputError if an object of that name belongs to another job.
    """
    return [manifest for manifest in map(_annotate_manifest, objects) if _ensure_object(api, manifest)]


def set_owner(api: ClusterClient, job: KubernetesObject, objects: Iterable[KubernetesObject]) -> None:
    """Make the job the owner of its objects, so that the API server deletes them with it, and before it.

    Raises InputError if an object of that name belongs to another job.
    """
    resource = resource_of(job)
    owner = {
        "apiVersion": resource.api_version,
        "kind": resource.kind,
        "name": name_of(job),
        "uid": uid_of(job),
        "blockOwnerDeletion": True,
    }
    for manifest in map(_annotate_manifest, objects):
        owned = {"ownerReferences": [owner]}
        existing = api.get_or_none(resource_of(manifest), name_of(manifest))
        if existing is None:
            _create_if_absent(api, {**manifest, "metadata": {**manifest["metadata"], **owned}})
            continue
        _check_same_stage(existing, manifest)
        api.patch(resource_of(manifest), name_of(manifest), {"metadata": owned})


def _remove_owned_objects(api: ClusterClient, objects: Iterable[KubernetesObject]) -> None:
    """Delete the objects that were created for a refused job."""
    for manifest in objects:
        existing = api.get_or_none(resource_of(manifest), name_of(manifest))
        if existing is not None:
            delete_object(api, existing)


def _annotate_manifest(manifest: KubernetesObject) -> KubernetesObject:
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    annotations = {**annotations_of(manifest), MANIFEST_ANNOTATION: digest}
    return {**manifest, "metadata": {**manifest["metadata"], "annotations": annotations}}


def _ensure_object(api: ClusterClient, manifest: KubernetesObject) -> bool:
    """Create an object, or replace that of an earlier job. Returns True if this call created it."""
    if _create_if_absent(api, manifest):
        return True
    existing = api.get_or_none(resource_of(manifest), name_of(manifest))
    if existing is not None:
        _check_same_stage(existing, manifest)
        digest = annotations_of(existing).get(MANIFEST_ANNOTATION)
        if digest == annotations_of(manifest)[MANIFEST_ANNOTATION] and not is_being_deleted(existing):
            return False
        delete_object(api, existing)
        wait_until_gone(api, existing)
    return _create_if_absent(api, manifest)


def _create_if_absent(api: ClusterClient, manifest: KubernetesObject) -> bool:
    """Create an object. Returns False if one of that name exists."""
    try:
        _create(api, manifest)
    except ApiAlreadyExists:
        return False
    return True


def _create(api: ClusterClient, manifest: KubernetesObject, *, dry_run: bool = False) -> None:
    """Create an object. Raises the error that names the missing operator if the cluster does not serve the kind."""
    resource = resource_of(manifest)
    try:
        api.create(resource, manifest, dry_run=dry_run)
    except KindNotServed:
        raise api.missing_error(resource) from None


def _check_same_stage(existing: KubernetesObject, manifest: KubernetesObject) -> None:
    """Raise InputError if the object was not created for this stage of this run."""
    labels = labels_of(existing)
    if any(labels.get(name) != labels_of(manifest)[name] for name in (NAME_LABEL, RUN_LABEL, STAGE_LABEL)):
        raise InputError(
            "exists and was not created for this job, which needs that name",
            field=title_of(manifest),
            hint="Choose another run.id, or delete it.",
        )
