"""A small Kubernetes API server in this process, behind a real socket: objects, watches, logs, and faults on request.

It knows no controllers: tests play the operator by changing objects. What it answers (status codes, reasons, Status
objects, the shape of watch events) is what a kube-apiserver 1.35 answers.
"""

import copy
import json
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

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
_PATH = re.compile(
    r"^(?:/api/(v1)|/apis/([^/]+/[^/]+))(?:/namespaces/([^/]+)(?=/))?(?:/([^/]+)(?:/([^/]+)(?:/([^/]+))?)?)?$"
)


@dataclass
class Answer:
    """A refusal: HTTP status, the API's reason and message, and headers."""

    status: int
    reason: str = ""
    message: str = ""
    details: Object = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    half: bool = False
    """The connection breaks in the middle of the body."""


@dataclass
class Seen:
    """One request as it came."""

    method: str
    path: str
    query: dict[str, str]
    body: Object


@dataclass
class Log:
    """What one container (one of its lives) has printed: (stamp, text); open while it runs."""

    lines: list[tuple[str, str]] = field(default_factory=list)
    open: bool = True


class FakeCluster:
    """Start it with `running()`. Everything public may be changed while it runs."""

    def __init__(self) -> None:
        self.kinds = {version: set(plurals.split()) for version, plurals in {**BUILT_IN, **OPERATORS}.items()}
        self.tokens = {"good"}
        self.denied: set[tuple[str, str]] = set()
        """(verb, plural) that RBAC refuses."""
        self.admission: list[Callable[[str, Object], Answer | None]] = []
        """Webhooks: (plural, object) -> a refusal or None."""
        self.faults: list[Callable[[Seen], Answer | None]] = []
        """Asked before each request; a fault that answers is used up."""
        self.seen: list[Seen] = []
        self.logs: dict[str, list[Log]] = {}
        """By pod: the lives of its container, the newest last."""
        self.changed = threading.Condition()
        self._objects: dict[tuple[str, str, str], Object] = {}
        self._history: list[tuple[int, str, str, Object]] = []
        self._version = 100
        self._oldest = 100
        self._connections: set[socket.socket] = set()
        self._server: ThreadingHTTPServer | None = None
        self._port = 0
        for name in ("default", "train"):
            self.put("namespaces", {"metadata": {"name": name}, "status": {"phase": "Active"}})

    # what a test does

    @contextmanager
    def running(self) -> Iterator["FakeCluster"]:
        self.up()
        try:
            yield self
        finally:
            self.down()

    def kubeconfig(self, path: Path, token: str = "good") -> Path:
        entry = {"name": "fake", "cluster": {"server": f"http://127.0.0.1:{self._port}"}}
        context = {"name": "fake", "context": {"cluster": "fake", "user": "me", "namespace": "train"}}
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [entry],
            "contexts": [context],
            "users": [{"name": "me", "user": {"token": token}}],
            "current-context": "fake",
        }
        path.write_text(yaml.safe_dump(content))
        return path

    def up(self) -> None:
        cluster = self

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            allow_reuse_address = True

            def process_request(self, request: Any, address: Any) -> None:
                cluster._connections.add(request)
                super().process_request(request, address)

            def handle_error(self, request: Any, address: Any) -> None:
                pass  # broken connections are part of the play

        self._server = Server(("127.0.0.1", self._port), _handler(self))
        self._port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def down(self) -> None:
        """As when the machine of the API server is cut off: nobody listens, open connections break."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
        self.cut()

    def cut(self) -> None:
        """Breaks every open connection."""
        for connection in list(self._connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._connections.clear()

    def put(self, plural: str, thing: Object, namespace: str = "train") -> Object:
        """Creates or replaces an object, as a controller would."""
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
        """Deletes an object and what it owns."""
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
        """As etcd's compaction: watches from older versions are answered with 410."""
        with self.changed:
            self._version += 10
            self._oldest = self._version
            self._history.clear()
        self.cut()

    def say(self, pod: str, text: str, stamp: str | None = None) -> None:
        """A line of the newest life of a pod's container."""
        with self.changed:
            lives = self.logs.setdefault(pod, [Log()])
            lives[-1].lines.append((stamp or now(precise=True), text))
            self.changed.notify_all()

    def restart(self, pod: str) -> None:
        """The container ended and a new one begins."""
        with self.changed:
            lives = self.logs.setdefault(pod, [Log()])
            lives[-1].open = False
            lives.append(Log())
            self.changed.notify_all()

    def hang_up(self, pod: str) -> None:
        """The container ended."""
        with self.changed:
            self.logs.setdefault(pod, [Log()])[-1].open = False
            self.changed.notify_all()

    # what the server does

    def _record(self, change: str, plural: str, thing: Object) -> None:
        self._version += 1
        thing["metadata"]["resourceVersion"] = str(self._version)
        self._history.append((self._version, change, plural, copy.deepcopy(thing)))
        self.changed.notify_all()

    def select(self, plural: str, namespace: str, query: dict[str, str]) -> tuple[list[Object], str]:
        with self.changed:
            found = [
                copy.deepcopy(thing)
                for (kind, where, _), thing in self._objects.items()
                if kind == plural and (not namespace or where in ("", namespace)) and _matches(thing, query)
            ]
            return found, str(self._version)

    def changes(self, plural: str, query: dict[str, str], after: int, until: float) -> Iterator[tuple[str, Object]]:
        """Changes as they happen; an ERROR where `after` is forgotten."""
        while time.monotonic() < until:
            with self.changed:
                if after < self._oldest:
                    yield "ERROR", _status(Answer(410, "Expired", "too old resource version"))
                    return
                found = [entry for entry in self._history if entry[0] > after and entry[2] == plural]
                if not found:
                    self.changed.wait(0.05)
                    continue
            for version, change, _, thing in found:
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
        found: Any = thing
        for word in path.split("."):
            found = (found or {}).get(word)
        if found != value:
            return False
    return True


def _status(answer: Answer) -> Object:
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "message": answer.message,
        "reason": answer.reason,
        "details": answer.details,
        "code": answer.status,
    }


def _handler(cluster: FakeCluster) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments: Any) -> None:
            pass

        def do_GET(self) -> None:
            self._serve()

        do_POST = do_PATCH = do_DELETE = do_GET  # noqa: N815 (names that http.server looks for)

        def _serve(self) -> None:
            parts = urlsplit(self.path)
            query = {name: values[0] for name, values in parse_qs(parts.query).items()}
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else {}
            seen = Seen(self.command, parts.path, query, body)
            cluster.seen.append(seen)
            for fault in list(cluster.faults):
                if (answer := fault(seen)) is not None:
                    cluster.faults.remove(fault)
                    self._refuse(answer)
                    return
            token = self.headers.get("Authorization", "").removeprefix("Bearer ")
            if token not in cluster.tokens:
                self._refuse(Answer(401, "Unauthorized", "Unauthorized"))
                return
            if not self._discover(parts.path):
                self._object(seen)

        def _discover(self, path: str) -> bool:
            if path == "/version":
                self._json({"major": "1", "minor": "35", "gitVersion": "v1.35.4"})
                return True
            words = path.strip("/").split("/")
            if "proxy" in words:  # no service answers here
                self._text(503, "no endpoints available for service")
                return True
            group = words[1] if words[0] == "apis" and len(words) > 1 else ""
            if words[0] == "apis" and len(words) == 2:
                versions = [name.split("/")[1] for name in cluster.kinds if name.startswith(f"{group}/")]
                if not versions:
                    self._text(404, "404 page not found")
                else:
                    listed = [{"groupVersion": f"{group}/{name}", "version": name} for name in versions]
                    self._json({"kind": "APIGroup", "name": group, "versions": listed})
                return True
            if (words[0] == "apis" and len(words) == 3) or (words[0] == "api" and len(words) == 2):
                plurals = cluster.kinds.get("/".join(words[1:]))
                if plurals is None:
                    self._text(404, "404 page not found")
                else:
                    self._json({"kind": "APIResourceList", "resources": [{"name": name} for name in sorted(plurals)]})
                return True
            return False

        def _object(self, seen: Seen) -> None:
            found = _PATH.match(seen.path)
            assert found, seen.path
            core, grouped, namespace, plural, name, part = found.groups()
            version = core or grouped
            verb = {"GET": "get" if name else "list", "POST": "create", "PATCH": "patch", "DELETE": "delete"}[
                seen.method
            ]
            verb = "watch" if "watch" in seen.query else verb
            denied = f"{plural}/{part}" if part else plural
            if (verb, denied) in cluster.denied:
                text = (
                    f'{plural}.{version} is forbidden: User "me" cannot {verb} resource "{plural}" in API group '
                    f'"{version}" in the namespace "{namespace}"'
                )
                return self._refuse(Answer(403, "Forbidden", text, {"kind": plural}))
            if plural not in cluster.kinds.get(version, ()):  # RBAC comes first
                return self._text(404, "404 page not found")
            if plural == "selfsubjectaccessreviews":
                wanted = seen.body["spec"]["resourceAttributes"]
                what = wanted["resource"] + (f"/{wanted['subresource']}" if wanted.get("subresource") else "")
                return self._json({**seen.body, "status": {"allowed": (wanted["verb"], what) not in cluster.denied}})
            if part == "log":
                return self._log(name, seen.query)
            if verb == "list":
                return self._list(plural, namespace or "", seen.query)
            if verb == "watch":
                return self._watch(plural, seen.query)
            if verb == "create":
                made = cluster.create(plural, namespace or "", seen.body, dry_run="dryRun" in seen.query)
                return self._refuse(made) if isinstance(made, Answer) else self._json(made, 201)
            return self._one(verb, plural, namespace or "", name, seen)

        def _one(self, verb: str, plural: str, namespace: str, name: str, seen: Seen) -> None:
            stored = cluster.get(plural, name, namespace)
            if stored is None:
                text = f'{plural} "{name}" not found'
                return self._refuse(Answer(404, "NotFound", text, {"name": name, "kind": plural}))
            if verb == "delete":
                uid = (seen.body.get("preconditions") or {}).get("uid")
                if uid is not None and uid != stored["metadata"]["uid"]:
                    return self._refuse(Answer(409, "Conflict", "the UID in the precondition does not match"))
                cluster.remove(plural, name, namespace)
            if verb == "patch":
                stored = cluster.put(plural, _merged(stored, seen.body), namespace)
            return self._json(stored)

        def _list(self, plural: str, namespace: str, query: dict[str, str]) -> None:
            found, version = cluster.select(plural, namespace, query)
            start, limit = int(query.get("continue") or 0), int(query.get("limit") or 10**9)
            metadata = {"resourceVersion": version}
            if start + limit < len(found):
                metadata["continue"] = str(start + limit)
            self._json({"kind": "List", "metadata": metadata, "items": found[start : start + limit]})

        def _watch(self, plural: str, query: dict[str, str]) -> None:
            self._begin("application/json")
            until = time.monotonic() + float(query.get("timeoutSeconds", "60"))
            for change, thing in cluster.changes(plural, query, int(query["resourceVersion"]), until):
                self._chunk(json.dumps({"type": change, "object": thing}).encode() + b"\n")
            self._chunk(b"")

        def _log(self, pod: str, query: dict[str, str]) -> None:
            lives = cluster.logs.get(pod, [])
            previous = "previous" in query
            if not lives or (previous and len(lives) < 2):
                self._refuse(Answer(400, "BadRequest", f"previous terminated container in pod {pod} not found"))
                return
            life = lives[-2] if previous else lives[-1]
            since, sent = query.get("sinceTime", ""), 0
            self._begin("text/plain")
            while True:
                with cluster.changed:
                    new, sent = life.lines[sent:], len(life.lines)
                    ended = not life.open or "follow" not in query
                    if not new and not ended:
                        cluster.changed.wait(0.05)
                for stamp, text in new:
                    if stamp[:19] >= since[:19]:
                        self._chunk(f"{stamp} {text}\n".encode())
                if ended:
                    break
            self._chunk(b"")

        def _begin(self, kind: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.flush()

        def _chunk(self, data: bytes) -> None:
            self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            self.wfile.flush()

        def _refuse(self, answer: Answer) -> None:
            if answer.half:
                self._begin("application/json")
                self.wfile.write(b"40\r\n{")
                raise ConnectionAbortedError
            self._json(_status(answer), answer.status, answer.headers)

        def _json(self, value: Object, status: int = 200, headers: dict[str, str] | None = None) -> None:
            self._send(status, json.dumps(value).encode(), "application/json", headers or {})

        def _text(self, status: int, text: str) -> None:
            self._send(status, text.encode(), "text/plain", {})

        def _send(self, status: int, data: bytes, kind: str, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in {"Content-Type": kind, "Content-Length": str(len(data)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

    return Handler


def _merged(before: Object, change: Object) -> Object:
    """JSON merge patch (RFC 7396)."""
    result = dict(before)
    for name, value in change.items():
        if value is None:
            result.pop(name, None)
        elif isinstance(value, dict):
            result[name] = _merged(result.get(name) or {}, value)
        else:
            result[name] = value
    return result
