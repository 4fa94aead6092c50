"""Cluster objects as real operators and kubelets write them, for the launcher's tests."""

import copy
import json
from typing import Any

from tests.support.fake_state import now

Object = dict[str, Any]

LABELS = {"app.kubernetes.io/name": "podscale", "podscale.dev/run": "r1", "podscale.dev/stage": "train"}


def job(kind: str = "PyTorchJob", name: str = "r1", identity: str = "same", **changes: Any) -> Object:
    """Return a job of two pods without a status; `changes` are `status`, `labels`, `suspend`."""
    template = {"metadata": {"labels": LABELS}, "spec": {"containers": [{"name": "pytorch", "image": "i"}]}}
    specs: dict[str, tuple[str, Object]] = {
        "PyTorchJob": (
            "kubeflow.org/v1",
            {"pytorchReplicaSpecs": {"Worker": {"replicas": 2, "template": template}}, "runPolicy": {}},
        ),
        "JAXJob": (
            "kubeflow.org/v1",
            {"jaxReplicaSpecs": {"Worker": {"replicas": 2, "template": template}}, "runPolicy": {}},
        ),
        "TrainJob": ("trainer.kubeflow.org/v1alpha1", {"runtimeRef": {"name": "r1"}, "trainer": {"numNodes": 2}}),
        "JobSet": (
            "jobset.x-k8s.io/v1alpha2",
            {"replicatedJobs": [{"name": "slice", "replicas": 1, "template": {"spec": {"parallelism": 2}}}]},
        ),
        "Job": ("batch/v1", {"parallelism": 2, "completions": 2, "template": template}),
    }
    version, spec = copy.deepcopy(specs[kind])
    if changes.get("suspend"):
        spec.get("runPolicy", spec)["suspend"] = True
    return {
        "apiVersion": version,
        "kind": kind,
        "metadata": {
            "name": name,
            "labels": {**LABELS, **changes.get("labels", {})},
            "annotations": {"podscale.dev/identity": identity},
        },
        "spec": spec,
        **({"status": changes["status"]} if "status" in changes else {}),
    }


def stored(thing: Object, uid: str = "u1", created: str | None = None) -> Object:
    """Return the object as the API server would."""
    return {**thing, "metadata": {"uid": uid, "creationTimestamp": created or now(), **thing["metadata"]}}


def condition(kind: str, status: str = "True", reason: str = "", message: str = "") -> Object:
    return {"type": kind, "status": status, "reason": reason, "message": message}


def pod(
    index: int = 0,
    *,
    state: Object | None = None,
    last: Object | None = None,
    restarts: int = 0,
    phase: str = "Running",
    name: str = "",
    uid: str = "",
    node: str = "node-1",
    status: Object | None = None,
    container: str = "pytorch",
) -> Object:
    """Return a worker pod of the training operator; `state` is that of its container (default: running)."""
    statuses = [
        {
            "name": container,
            "image": "registry.example/podscale:1",
            "restartCount": restarts,
            "state": state if state is not None else {"running": {"startedAt": now()}},
            "lastState": last or {},
        }
    ]
    metadata = {
        "name": name or f"r1-worker-{index}",
        "uid": uid or f"pod-{index}",
        "creationTimestamp": now(),
        "labels": {**LABELS, "training.kubeflow.org/replica-index": str(index)},
    }
    pod_status: Object = {"phase": phase, **({"containerStatuses": statuses} if node else {}), **(status or {})}
    return {"metadata": metadata, "spec": {"nodeName": node} if node else {}, "status": pod_status}


def waiting(reason: str, message: str = "") -> Object:
    return {"waiting": {"reason": reason, "message": message}}


def terminated(code: int, error: str | None = None, reason: str = "Error") -> Object:
    """Return the state of a terminated container; `error` is the stage's termination message."""
    message = json.dumps({"stage": "train", "exit_code": code, "error": error}) if error is not None else ""
    return {"terminated": {"exitCode": code, "reason": reason, "message": message, "finishedAt": now()}}


def unschedulable(index: int, message: str) -> Object:
    return pod(
        index,
        phase="Pending",
        node="",
        status={"conditions": [condition("PodScheduled", "False", "Unschedulable", message)]},
    )


def event(about: str, reason: str, message: str) -> Object:
    return {
        "metadata": {"name": f"{about}.{reason.lower()}"},
        "type": "Warning",
        "reason": reason,
        "message": message,
        "involvedObject": {"name": about},
        "lastTimestamp": now(),
    }
