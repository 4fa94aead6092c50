"""State of the fake Kubernetes API server: objects and their changes, logs, and injected faults."""

import copy
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

Object = dict[str, Any]

BUILT_IN = {
    "v1": "pods events configmaps namespaces nodes resourcequotas persistentvolumeclaims services serviceaccounts",
    "apps/v1": "deployments",
    "batch/v1": "jobs",
    "networking.k8s.io/v1": "networkpolicies",
    "storage.k8s.io/v1": "storageclasses",
    "apiextensions.k8s.io/v1": "customresourcedefinitions",
    "authorization.k8s.io/v1": "selfsubjectaccessreviews",
}
OPERATORS = {
    "kubeflow.org/v1": "pytorchjobs jaxjobs",
    "trainer.kubeflow.org/v1alpha1": "trainjobs trainingruntimes clustertrainingruntimes",
    "jobset.x-k8s.io/v1alpha2": "jobsets",
    "kueue.x-k8s.io/v1beta2": "workloads localqueues",
}
CLUSTER_WIDE = {"namespaces", "nodes", "storageclasses", "customresourcedefinitions", "selfsubjectaccessreviews"}


@dataclass
class Answer:
    """Error response: HTTP status, the API's reason and message, and headers."""

    status: int
    reason: str = ""
    message: str = ""
    details: Object = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    half: bool = False
    """True if the connection breaks in the middle of the body."""

    def status_object(self) -> Object:
        """Status object in the body."""
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
            "details": self.details,
            "code": self.status,
        }


@dataclass
class Seen:
    """One received request."""

    method: str
    path: str
    query: dict[str, str]
    body: Object


@dataclass
class Log:
    """Output of one start of a container, as (stamp, text); open while it runs."""

    lines: list[tuple[str, str]] = field(default_factory=list)
    open: bool = True


class ClusterState:
    """Objects by plural, namespace and name; every change wakes the watches."""

    def __init__(self) -> None:
        self.kinds = {version: set(plurals.split()) for version, plurals in {**BUILT_IN, **OPERATORS}.items()}
        self.tokens = {"good"}
        self.denied: set[tuple[str, str]] = set()
        """(verb, plural) pairs that RBAC denies."""
        self.admission: list[Callable[[str, Object], Answer | None]] = []
        """Webhooks: (plural, object) -> an error response or None."""
        self.faults: list[Callable[[Seen], Answer | None]] = []
        """Faults, called before each request; a fault that responds is removed."""
        self.seen: list[Seen] = []
        self.served: dict[str, str] = {}
        """Responses of pods to proxied requests, by `pod:port`."""
        self.logs: dict[str, list[Log]] = {}
        """Logs of each pod's container, one per start, the newest last."""
        self.changed = threading.Condition()
        self._objects: dict[tuple[str, str, str], Object] = {}
        self._history: list[tuple[int, str, str, Object]] = []
        self._version = 100
        self._oldest = 100
        for name in ("default", "train"):
            self.put("namespaces", {"metadata": {"name": name}, "status": {"phase": "Active"}})

    def put(self, plural: str, thing: Object, namespace: str = "train") -> Object:
        """Create or replace an object, as a controller would."""
        with self.changed:
            key = (plural, "" if plural in CLUSTER_WIDE else namespace, thing["metadata"]["name"])
            before = self._objects.get(key)
            stored = copy.deepcopy(thing)
            metadata = stored["metadata"]
            if key[1]:
                metadata["namespace"] = key[1]
            same = before["metadata"] if before else {}
            metadata.setdefault("uid", same.get("uid") or str(uuid.uuid4()))
            metadata.setdefault("creationTimestamp", same.get("creationTimestamp") or now())
            self._objects[key] = stored
            self._record("MODIFIED" if before else "ADDED", plural, stored)
            return copy.deepcopy(stored)

    def get(self, plural: str, name: str, namespace: str = "train") -> Object | None:
        with self.changed:
            return copy.deepcopy(self._objects.get((plural, "" if plural in CLUSTER_WIDE else namespace, name)))

    def all(self, plural: str) -> list[Object]:
        with self.changed:
            return [copy.deepcopy(thing) for key, thing in self._objects.items() if key[0] == plural]

    def remove(self, plural: str, name: str, namespace: str = "train") -> None:
        """Delete an object and the objects that it owns."""
        with self.changed:
            gone = self._objects.pop((plural, "" if plural in CLUSTER_WIDE else namespace, name))
            self._record("DELETED", plural, gone)
            uid = gone["metadata"]["uid"]
            owned = [
                key
                for key, thing in self._objects.items()
                if any(owner["uid"] == uid for owner in thing["metadata"].get("ownerReferences", ()))
            ]
        for key in owned:
            self.remove(key[0], key[2], key[1])

    def forget_history(self) -> None:
        """Simulate etcd's compaction: watches from older versions get status 410."""
        with self.changed:
            self._version += 10
            self._oldest = self._version
            self._history.clear()

    def say(self, pod: str, text: str, stamp: str | None = None) -> None:
        """Add a log line to the newest start of a pod's container."""
        with self.changed:
            logs = self.logs.setdefault(pod, [Log()])
            logs[-1].lines.append((stamp or now(precise=True), text))
            self.changed.notify_all()

    def restart(self, pod: str) -> None:
        """End the container's log and begin that of a new one."""
        with self.changed:
            logs = self.logs.setdefault(pod, [Log()])
            logs[-1].open = False
            logs.append(Log())
            self.changed.notify_all()

    def hang_up(self, pod: str) -> None:
        """End the container's log."""
        with self.changed:
            self.logs.setdefault(pod, [Log()])[-1].open = False
            self.changed.notify_all()

    def _record(self, change: str, plural: str, thing: Object) -> None:
        self._version += 1
        thing["metadata"]["resourceVersion"] = str(self._version)
        self._history.append((self._version, change, plural, copy.deepcopy(thing)))
        self.changed.notify_all()

    def select(self, plural: str, namespace: str, query: dict[str, str]) -> tuple[list[Object], str]:
        with self.changed:
            items = [
                copy.deepcopy(thing)
                for (kind, where, _), thing in self._objects.items()
                if kind == plural and (not namespace or where in ("", namespace)) and _matches(thing, query)
            ]
            return items, str(self._version)

    def changes(self, plural: str, query: dict[str, str], after: int, until: float) -> Iterator[tuple[str, Object]]:
        """Yield changes as they happen; an ERROR event if version `after` was compacted."""
        while time.monotonic() < until:
            with self.changed:
                if after < self._oldest:
                    yield "ERROR", Answer(410, "Expired", "too old resource version").status_object()
                    return
                entries = [entry for entry in self._history if entry[0] > after and entry[2] == plural]
                if not entries:
                    self.changed.wait(0.05)
                    continue
            for version, change, _, thing in entries:
                after = version
                if _matches(thing, query):
                    yield change, thing

    def create(self, plural: str, namespace: str, body: Object, *, dry_run: bool) -> Object | Answer:
        name = body["metadata"].get("name", "")
        for webhook in self.admission:
            if (refused := webhook(plural, body)) is not None:
                return refused
        if len(name) > 63 or not re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", name):
            why = f'metadata.name: Invalid value: "{name}": must be no more than 63 characters'
            return Answer(422, "Invalid", f'{plural} "{name}" is invalid: {why}')
        with self.changed:
            if plural not in CLUSTER_WIDE and ("namespaces", "", namespace) not in self._objects:
                text = f'namespaces "{namespace}" not found'
                return Answer(404, "NotFound", text, {"name": namespace, "kind": "namespaces"})
            if (plural, namespace, name) in self._objects:
                return Answer(409, "AlreadyExists", f'{plural} "{name}" already exists', {"name": name, "kind": plural})
            if dry_run:
                return body
            return self.put(plural, body, namespace)


def now(*, precise: bool = False) -> str:
    moment = time.time_ns()
    text = datetime.fromtimestamp(moment // 10**9, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    return f"{text}.{moment % 10**9:09}Z" if precise else f"{text}Z"


def _matches(thing: Object, query: dict[str, str]) -> bool:
    labels = thing["metadata"].get("labels") or {}
    for pair in filter(None, query.get("labelSelector", "").split(",")):
        name, equals, value = pair.partition("=")
        if name not in labels or (equals and labels[name] != value):
            return False
    for pair in filter(None, query.get("fieldSelector", "").split(",")):
        path, value = pair.split("=", 1)
        current: Any = thing
        for key in path.split("."):
            current = (current or {}).get(key)
        if current != value:
            return False
    return True
