"""Run of Kubeflow Pipelines that this process belongs to, from the launcher's own pod.

KFP's pods are owned by an Argo Workflow. A training job that the Workflow owns as well is deleted with it, so that
deleting the run of the pipeline stops the job. Without the right to read its own pod, the launcher does without.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from podscale.errors import PodscaleError
from podscale.kubernetes.client import ClusterClient
from podscale.kubernetes.resources import PODS, KubernetesObject
from podscale.kubernetes.transport import SERVICE_ACCOUNT_PATH

POD_NAME = "KFP_POD_NAME"
"""Variable with the name of the pod, which KFP sets in every task."""
POD_NAMESPACE = "NAMESPACE"
"""Variable with the namespace of the pod, which some versions of KFP set."""
WORKFLOW_GROUP = "argoproj.io/"


@dataclass(frozen=True)
class PipelineRun:
    """A run of the pipeline.

    Args:
        identity: The same for all attempts of its tasks, and different between runs.
        owner: Owner reference to its Workflow, for objects in the same namespace; None if it is not known.
    """

    identity: str
    owner: KubernetesObject | None = None


def find_pipeline_run(api: ClusterClient, environ: Mapping[str, str] = os.environ) -> PipelineRun | None:
    """Return the run of the pipeline; None outside of KFP's pods."""
    pod = environ.get(POD_NAME)
    if not pod:
        return None
    owner = _find_workflow(api, pod, environ)
    if owner is not None:
        return PipelineRun(str(owner["uid"]), owner)
    return PipelineRun(pod.rpartition("-")[0] or pod)  # <workflow>-<template>-<number of the attempt's node>


def _find_workflow(api: ClusterClient, pod: str, environ: Mapping[str, str]) -> KubernetesObject | None:
    """Return the owner reference to the pod's Workflow; None without the right to read the pod."""
    namespace = environ.get(POD_NAMESPACE) or _mounted_namespace() or api.namespace
    if namespace != api.namespace:
        return None  # an owner must be in the namespace of what it owns
    try:
        owners = api.get(PODS, pod)["metadata"].get("ownerReferences") or []
    except PodscaleError:
        return None
    for owner in owners:
        if owner.get("kind") == "Workflow" and str(owner.get("apiVersion", "")).startswith(WORKFLOW_GROUP):
            return {name: owner[name] for name in ("apiVersion", "kind", "name", "uid")}
    return None


def _mounted_namespace() -> str:
    try:
        return (SERVICE_ACCOUNT_PATH / "namespace").read_text(encoding="utf-8").strip()
    except OSError:
        return ""
