"""The objects beside a job (NetworkPolicy, TrainingRuntime): made before it, of this very document, gone with it."""

import hashlib
import json
from collections.abc import Iterable, Sequence

from podscale.errors import InputError
from podscale.launch.cluster.api import ClusterClient
from podscale.launch.cluster.errors import ApiAlreadyExists, KindNotServed
from podscale.launch.cluster.pods import name_of
from podscale.launch.cluster.removal import delete_job, wait_until_gone
from podscale.launch.cluster.resources import KubernetesObject, resource_of
from podscale.launch.jobspec import NAME_LABEL, RUN_LABEL, STAGE_LABEL

MANIFEST_ANNOTATION = "podscale.dev/manifest"
"""Annotation: what an object was made from. The API server fills in defaults, so the object itself does not tell."""
PODSCALE_LABELS = (NAME_LABEL, RUN_LABEL, STAGE_LABEL)


def prepare_owned_objects(api: ClusterClient, objects: Iterable[KubernetesObject]) -> Sequence[KubernetesObject]:
    """Creates what is not there and replaces what an earlier job left; returns what was made.

    For a job that does not exist yet. Raises InputError for an object of that name that is not this job's.
    """
    return [companion for companion in map(_annotate_manifest, objects) if _prepare_one(api, companion)]


def set_owner(api: ClusterClient, job: KubernetesObject, objects: Iterable[KubernetesObject]) -> None:
    """Makes the job the owner of its companions, so that they go with it, and it is not gone before they are.

    Raises InputError for an object of that name that is not this job's.
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
    """Takes back what was made for a job that was refused."""
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
    if any(labels.get(name) != wanted[name] for name in PODSCALE_LABELS):
        raise InputError(
            "exists and was not made for this job, which needs one of that name",
            field=f"{companion['kind']} {name_of(companion)}",
            hint="Choose another run.id, or delete it.",
        )


def _annotations_of(thing: KubernetesObject) -> dict[str, str]:
    return thing["metadata"].get("annotations") or {}
