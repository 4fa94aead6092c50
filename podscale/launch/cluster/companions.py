"""The objects beside a job (NetworkPolicy, TrainingRuntime): made before it, of this very document, gone with it."""

import hashlib
import json
from collections.abc import Iterable, Sequence

from podscale.errors import InputError
from podscale.launch.cluster.api import Api
from podscale.launch.cluster.errors import AlreadyExists, Missing
from podscale.launch.cluster.pods import name_of
from podscale.launch.cluster.removal import delete, wait_until_gone
from podscale.launch.cluster.resources import NAME_LABEL, RUN_LABEL, STAGE_LABEL, Object, resource_of

MANIFEST = "podscale.dev/manifest"
"""Annotation: what an object was made from. The API server fills in defaults, so the object itself does not tell."""
OURS = (NAME_LABEL, RUN_LABEL, STAGE_LABEL)


def prepare(api: Api, companions: Iterable[Object]) -> Sequence[Object]:
    """Creates what is not there and replaces what an earlier job left; returns what was made.

    For a job that does not exist yet. Raises InputError for an object of that name that is not this job's.
    """
    return [companion for companion in map(_marked, companions) if _prepared(api, companion)]


def own(api: Api, job: Object, companions: Iterable[Object]) -> None:
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
    for companion in map(_marked, companions):
        owned = {"metadata": {"ownerReferences": [owner]}}
        found = api.find(resource_of(companion), name_of(companion))
        if found is None:
            _create(api, {**companion, "metadata": {**companion["metadata"], **owned["metadata"]}})
            continue
        _refuse_foreign(found, companion)
        api.merge(resource_of(companion), name_of(companion), owned)


def remove(api: Api, companions: Iterable[Object]) -> None:
    """Takes back what was made for a job that was refused."""
    for companion in companions:
        resource = resource_of(companion)
        found = api.find(resource, name_of(companion))
        if found is not None:
            delete(api, resource, name_of(companion), str(found["metadata"]["uid"]))


def _marked(companion: Object) -> Object:
    digest = hashlib.sha256(json.dumps(companion, sort_keys=True).encode()).hexdigest()
    metadata = companion["metadata"]
    return {**companion, "metadata": {**metadata, "annotations": {**metadata.get("annotations", {}), MANIFEST: digest}}}


def _prepared(api: Api, companion: Object) -> bool:
    """Whether it was made here."""
    if _create(api, companion):
        return True
    resource, name = resource_of(companion), name_of(companion)
    found = api.find(resource, name)
    if found is not None:
        _refuse_foreign(found, companion)
        leaving = "deletionTimestamp" in found["metadata"]
        if not leaving and _annotations(found).get(MANIFEST) == _annotations(companion)[MANIFEST]:
            return False
        delete(api, resource, name, str(found["metadata"]["uid"]))
        wait_until_gone(api, resource, name, str(found["metadata"]["uid"]))
    return _create(api, companion)


def _create(api: Api, companion: Object) -> bool:
    """False where one of that name is there."""
    resource = resource_of(companion)
    try:
        api.create(resource, companion)
    except AlreadyExists:
        return False
    except Missing:
        raise api.missing(resource) from None
    return True


def _refuse_foreign(found: Object, companion: Object) -> None:
    """Raises InputError where the object was not made for this stage of this run."""
    labels, wanted = found["metadata"].get("labels") or {}, companion["metadata"]["labels"]
    if any(labels.get(name) != wanted[name] for name in OURS):
        raise InputError(
            "exists and was not made for this job, which needs one of that name",
            field=f"{companion['kind']} {name_of(companion)}",
            hint="Choose another run.id, or delete it.",
        )


def _annotations(thing: Object) -> dict[str, str]:
    return thing["metadata"].get("annotations") or {}
