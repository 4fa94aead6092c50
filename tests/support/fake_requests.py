"""Request handling of the fake API server: discovery, permissions, objects, watches and logs of kube-apiserver 1.35."""

import json
import re
import time
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.support.fake_state import Answer, ClusterState, Object, Seen

_PATH = re.compile(
    r"^(?:/api/(v1)|/apis/([^/]+/[^/]+))(?:/namespaces/([^/]+)(?=/))?(?:/([^/]+)(?:/([^/]+)(?:/([^/]+))?)?)?$"
)


class Handler(BaseHTTPRequestHandler):
    """Handler of one connection to the state of `cluster`, which a subclass sets."""

    cluster: ClusterState
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are two writes; the client acknowledges the first after 40 ms

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._serve()

    do_POST = do_PATCH = do_DELETE = do_GET  # noqa: N815 (names that http.server looks for)

    def _serve(self) -> None:
        parts = urlsplit(self.path)
        query = {name: value for name, (value,) in parse_qs(parts.query).items()}  # each once
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else {}
        seen = Seen(self.command, parts.path, query, body)
        self.cluster.seen.append(seen)
        for fault in list(self.cluster.faults):
            if (answer := fault(seen)) is not None:
                self.cluster.faults.remove(fault)
                self._refuse(answer)
                return
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token not in self.cluster.tokens:
            self._refuse(Answer(401, "Unauthorized", "Unauthorized"))
            return
        if not self._discover(parts.path):
            self._object(seen)

    def _discover(self, path: str) -> bool:
        if path == "/version":
            self._json({"major": "1", "minor": "35", "gitVersion": "v1.35.4"})
            return True
        parts = path.strip("/").split("/")
        if "proxy" in parts:
            self._pass_on(parts[4], unquote(parts[5]))
            return True
        group = parts[1] if parts[0] == "apis" and len(parts) > 1 else ""
        if parts[0] == "apis" and len(parts) == 2:
            versions = [name.split("/")[1] for name in self.cluster.kinds if name.startswith(f"{group}/")]
            if not versions:
                self._text(404, "404 page not found")
            else:
                listed = [{"groupVersion": f"{group}/{name}", "version": name} for name in versions]
                self._json({"kind": "APIGroup", "name": group, "versions": listed})
            return True
        if (parts[0] == "apis" and len(parts) == 3) or (parts[0] == "api" and len(parts) == 2):
            plurals = self.cluster.kinds.get("/".join(parts[1:]))
            if plurals is None:
                self._text(404, "404 page not found")
            else:
                self._json({"kind": "APIResourceList", "resources": [{"name": name} for name in sorted(plurals)]})
            return True
        return False

    def _pass_on(self, plural: str, target: str) -> None:
        """Proxy a request to a pod for which the test has an answer; services are not supported."""
        if ("get", f"{plural}/proxy") in self.cluster.denied:
            self._refuse(Answer(403, "Forbidden", f'cannot get resource "{plural}/proxy"'))
        elif target in self.cluster.served:
            self._text(200, self.cluster.served[target])
        else:
            self._text(503, "no endpoints available for service")

    def _object(self, seen: Seen) -> None:
        match = _PATH.match(seen.path)
        assert match, seen.path
        core, grouped, namespace, plural, name, part = match.groups()
        version = core or grouped
        verb = {"GET": "get" if name else "list", "POST": "create", "PATCH": "patch", "DELETE": "delete"}[seen.method]
        verb = "watch" if "watch" in seen.query else verb
        denied = f"{plural}/{part}" if part else plural
        if (verb, denied) in self.cluster.denied:
            text = (
                f'{plural}.{version} is forbidden: User "me" cannot {verb} resource "{plural}" in API group '
                f'"{version}" in the namespace "{namespace}"'
            )
            return self._refuse(Answer(403, "Forbidden", text, {"kind": plural}))
        if plural not in self.cluster.kinds.get(version, ()):  # RBAC comes first
            return self._text(404, "404 page not found")
        if plural == "selfsubjectaccessreviews":
            attributes = seen.body["spec"]["resourceAttributes"]
            what = attributes["resource"] + (f"/{attributes['subresource']}" if attributes.get("subresource") else "")
            return self._json(
                {**seen.body, "status": {"allowed": (attributes["verb"], what) not in self.cluster.denied}}
            )
        if part == "log":
            return self._log(name, seen.query)
        if verb == "list":
            return self._list(plural, namespace or "", seen.query)
        if verb == "watch":
            return self._watch(plural, seen.query)
        if verb == "create":
            created = self.cluster.create(plural, namespace or "", seen.body, dry_run="dryRun" in seen.query)
            return self._refuse(created) if isinstance(created, Answer) else self._json(created, 201)
        return self._one(verb, plural, namespace or "", name, seen)

    def _one(self, verb: str, plural: str, namespace: str, name: str, seen: Seen) -> None:
        stored = self.cluster.get(plural, name, namespace)
        if stored is None:
            text = f'{plural} "{name}" not found'
            return self._refuse(Answer(404, "NotFound", text, {"name": name, "kind": plural}))
        if verb == "delete":
            uid = (seen.body.get("preconditions") or {}).get("uid")
            if uid is not None and uid != stored["metadata"]["uid"]:
                return self._refuse(Answer(409, "Conflict", "the UID in the precondition does not match"))
            self.cluster.remove(plural, name, namespace)
        if verb == "patch":
            stored = self.cluster.put(plural, _merged(stored, seen.body), namespace)
        return self._json(stored)

    def _list(self, plural: str, namespace: str, query: dict[str, str]) -> None:
        items, version = self.cluster.select(plural, namespace, query)
        start, limit = int(query.get("continue") or 0), int(query.get("limit") or 10**9)
        metadata = {"resourceVersion": version}
        if start + limit < len(items):
            metadata["continue"] = str(start + limit)
        self._json({"kind": "List", "metadata": metadata, "items": items[start : start + limit]})

    def _watch(self, plural: str, query: dict[str, str]) -> None:
        self._begin("application/json")
        until = time.monotonic() + float(query.get("timeoutSeconds", "60"))
        for change, thing in self.cluster.changes(plural, query, int(query["resourceVersion"]), until):
            self._chunk(json.dumps({"type": change, "object": thing}).encode() + b"\n")
        self._chunk(b"")

    def _log(self, pod: str, query: dict[str, str]) -> None:
        logs = self.cluster.logs.get(pod, [])
        previous = "previous" in query
        if not logs or (previous and len(logs) < 2):
            self._refuse(Answer(400, "BadRequest", f"previous terminated container in pod {pod} not found"))
            return
        log = logs[-2] if previous else logs[-1]
        since, sent = query.get("sinceTime", ""), 0
        self._begin("text/plain")
        while True:
            with self.cluster.changed:
                new, sent = log.lines[sent:], len(log.lines)
                ended = not log.open or "follow" not in query
                if not new and not ended:
                    self.cluster.changed.wait(0.05)
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
        self._json(answer.status_object(), answer.status, answer.headers)

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
