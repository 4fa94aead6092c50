"""Test double of the Kubeflow Model Registry: a server that keeps entries and refuses what its API does not allow.

The rules were written from the OpenAPI document api/openapi/model-registry.yaml of github.com/kubeflow/model-registry
(renamed kubeflow/hub), version v1alpha3 of the API, at commit bd07139a6 (2026-04-29): paths, methods, required fields,
names and types of fields, patterns of ids, names and integers, unique names, status codes. Unknown fields are refused,
as the real server's decoder does. No part of the document is copied here, and no real registry was seen.
"""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

ROOT = "/api/model_registry/v1alpha3"
ID = re.compile(r"[1-9][0-9]{0,8}")
PRINTABLE = re.compile(r"[\x20-\x7e]+")
INTEGER = re.compile(r"-?([1-9][0-9]{0,8}|0)")
LARGEST_PAGE = 2
"""Entries of a page, few so that clients have to follow the token."""

ARTIFACT_STATES = ("UNKNOWN", "PENDING", "LIVE", "MARKED_FOR_DELETION", "DELETED", "ABANDONED", "REFERENCE")
PARENT_STATES = ("LIVE", "ARCHIVED")
TEXT: Any = str
BASE = {"name": TEXT, "description": TEXT, "externalId": TEXT, "customProperties": dict}
CARD = dict.fromkeys(("readme", "maturity", "provider", "logo", "license", "licenseLink", "libraryName", "owner"), TEXT)
REGISTERED_MODEL = {**BASE, **CARD, "state": PARENT_STATES, "language": list, "tasks": list}
MODEL_VERSION = {**BASE, "registeredModelId": TEXT, "state": PARENT_STATES, "author": TEXT, "id": TEXT}
DOCUMENT = {**BASE, "artifactType": ("doc-artifact",), "uri": TEXT, "state": ARTIFACT_STATES}
MODEL = {
    **DOCUMENT,
    "artifactType": ("model-artifact",),
    **dict.fromkeys(("modelFormatName", "modelFormatVersion", "storageKey", "storagePath", "serviceAccountName"), TEXT),
    **dict.fromkeys([f"modelSource{part}" for part in ("Kind", "Class", "Group", "Id", "Name")], TEXT),
}
VALUES: dict[str, tuple[str, Any]] = {
    "MetadataStringValue": ("string_value", str),
    "MetadataDoubleValue": ("double_value", (int, float)),
    "MetadataIntValue": ("int_value", str),
    "MetadataBoolValue": ("bool_value", bool),
}
"""Field and type of each custom property by its metadataType; structs and protos are left out."""


class Refusal(Exception):
    """Answer other than success."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass
class ModelRegistry:
    """Entries of the registry by kind (`model`, `version`, `artifact`) and id, and all requests.

    Args:
        token: bearer token that requests must have; none: any.
        faults: status of the answer to a method and a path's last part, such as ("POST", "artifacts"), once each.
        lost_answers: such methods and parts whose next request is carried out and answered by a server error.
    """

    url: str = ""
    token: str = ""
    faults: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    lost_answers: list[tuple[str, str]] = field(default_factory=list)
    entries: dict[str, dict[str, dict[str, Any]]] = field(
        default_factory=lambda: {"model": {}, "version": {}, "artifact": {}}
    )
    requests: list[tuple[str, str]] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)

    def values(self, kind: str) -> list[dict[str, Any]]:
        """Return the entries of a kind in the order in which they were made."""
        return list(self.entries[kind].values())

    def answer(self, method: str, url: str, headers: Any, body: bytes) -> tuple[int, dict[str, Any]]:
        """Return the status and the JSON of an answer. Raises Refusal."""
        parts = urlsplit(url)
        self.requests.append((method, parts.path.removeprefix(ROOT)))
        if self.token and headers.get("Authorization") != f"Bearer {self.token}":
            raise Refusal(401, "no valid token")
        planned = self.faults.get((method, parts.path.rpartition("/")[2]))
        if planned:
            raise Refusal(planned.pop(0), "planned by the test")
        if not parts.path.startswith(f"{ROOT}/"):
            raise Refusal(404, f"no path {parts.path}")
        query = dict(parse_qsl(parts.query, strict_parsing=True)) if parts.query else {}
        entry = self._parse(body, headers) if method in ("POST", "PATCH") else {}
        match method, parts.path.removeprefix(f"{ROOT}/").split("/"):
            case "GET", ["registered_model"]:
                return 200, self._find("model", query, {"name", "externalId"})
            case "POST", ["registered_models"]:
                check(entry, REGISTERED_MODEL, ("name",))
                return 201, self._create("model", entry, "")
            case "GET", ["model_version"]:
                return 200, self._find("version", query, {"name", "externalId", "parentResourceId"})
            case "POST", ["registered_models", parent, "versions"]:
                self._need("model", parent)
                check(entry, MODEL_VERSION, ("name", "registeredModelId"))
                if entry["registeredModelId"] != parent:
                    raise Refusal(400, "registeredModelId is not that of the path")
                return 201, self._create("version", entry, parent)
            case "GET", ["model_versions", parent, "artifacts"]:
                self._need("version", parent)
                return 200, self._page("artifact", parent, query)
            case "POST", ["model_versions", parent, "artifacts"]:
                self._need("version", parent)
                check_artifact(entry)
                return 201, self._create("artifact", entry, parent)
            case "PATCH", ["artifacts", name]:
                known = self._need("artifact", name)
                check_artifact(entry)
                if "name" in entry or entry["artifactType"] != known["artifactType"]:
                    raise Refusal(400, "name and type of an artifact cannot change")
                known |= entry
                return 200, shown(known)
        raise Refusal(405, f"no operation {method} {parts.path}")

    def _parse(self, body: bytes, headers: Any) -> dict[str, Any]:
        if headers.get("Content-Type") != "application/json":
            raise Refusal(400, "the body is not application/json")
        try:
            entry = json.loads(body, parse_constant=lambda text: (_ for _ in ()).throw(ValueError(text)))
        except ValueError as error:
            raise Refusal(400, f"not JSON: {error}") from error
        if not isinstance(entry, dict):
            raise Refusal(400, "not an object")
        return entry

    def _need(self, kind: str, name: str) -> dict[str, Any]:
        if not ID.fullmatch(name):
            raise Refusal(400, f"not an id: {name}")
        if name not in self.entries[kind]:
            raise Refusal(404, f"no {kind} with id {name}")
        return self.entries[kind][name]

    def _find(self, kind: str, query: dict[str, str], known: set[str]) -> dict[str, Any]:
        if not query or not set(query) <= known:
            raise Refusal(400, f"parameters {sorted(query)}, of {sorted(known)}")
        for key, value in query.items():
            if not (ID if key == "parentResourceId" else PRINTABLE).fullmatch(value):
                raise Refusal(400, f"{key}: {value}")
        if "parentResourceId" in query:
            query["_parent"] = query.pop("parentResourceId")
        for entry in self.values(kind):
            if all(entry.get(key) == value for key, value in query.items()):
                return shown(entry)
        raise Refusal(404, f"no {kind} with {query}")

    def _page(self, kind: str, parent: str, query: dict[str, str]) -> dict[str, Any]:
        known = {"filterQuery", "name", "externalId", "artifactType", "pageSize", "orderBy", "sortOrder"}
        if not set(query) <= known | {"nextPageToken"} or not ID.fullmatch(query.get("pageSize", "1")):
            raise Refusal(400, f"parameters {query}")
        children = [entry for entry in self.values(kind) if entry["_parent"] == parent]
        start = int(query.get("nextPageToken", "0"))
        size = min(int(query.get("pageSize", "100")), LARGEST_PAGE)
        items = [shown(entry) for entry in children[start : start + size]]
        token = str(start + size) if start + size < len(children) else ""
        return {"items": items, "nextPageToken": token, "pageSize": size, "size": len(items)}

    def _create(self, kind: str, entry: dict[str, Any], parent: str) -> dict[str, Any]:
        if any(known.get("name") == entry.get("name") for known in self.values(kind)):
            raise Refusal(409, f"{kind} with name {entry.get('name')} already exists")
        number = str(sum(map(len, self.entries.values())) + 1)
        self.entries[kind][number] = entry | {"id": number, "_parent": parent, "createTimeSinceEpoch": number}
        return shown(self.entries[kind][number])


def shown(entry: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if not key.startswith("_")}


def check_artifact(entry: dict[str, Any]) -> None:
    kinds = {"model-artifact": MODEL, "doc-artifact": DOCUMENT}
    if entry.get("artifactType") not in kinds:
        raise Refusal(400, f"artifactType {entry.get('artifactType')}")
    check(entry, kinds[entry["artifactType"]], ())


def check(entry: dict[str, Any], fields: dict[str, Any], required: tuple[str, ...]) -> None:
    """Raise Refusal for a missing or unknown field, and for a value of another type."""
    if missing := [name for name in required if not entry.get(name)]:
        raise Refusal(400, f"missing: {missing}")
    for name, value in entry.items():
        kind = fields.get(name)
        if kind is None:
            raise Refusal(400, f"unknown field {name}")
        if isinstance(kind, tuple) and value not in kind:
            raise Refusal(400, f"{name}: {value}, not one of {kind}")
        if not isinstance(kind, tuple) and not isinstance(value, kind):
            raise Refusal(400, f"{name}: {value!r} is not {kind.__name__}")
        if name.endswith("Id") and name not in ("externalId", "modelSourceId") and not ID.fullmatch(value):
            raise Refusal(400, f"{name}: {value} is not an id")
    if entry.get("name") == "":
        raise Refusal(400, "name is empty")
    for name, value in entry.get("customProperties", {}).items():
        check_property(name, value)


def check_property(name: str, value: Any) -> None:
    kind = value.get("metadataType") if isinstance(value, dict) else None
    if kind not in VALUES or set(value) != {"metadataType", VALUES[kind][0]}:
        raise Refusal(400, f"customProperties.{name}: {value} is not a MetadataValue")
    content = value[VALUES[kind][0]]
    is_other_bool = isinstance(content, bool) and kind != "MetadataBoolValue"
    if not isinstance(content, VALUES[kind][1]) or is_other_bool:
        raise Refusal(400, f"customProperties.{name}: {content!r} is not of {kind}")
    if kind == "MetadataIntValue" and not INTEGER.fullmatch(content):
        raise Refusal(400, f"customProperties.{name}: {content} is not an int32 in text")


@contextmanager
def model_registry() -> Iterator[ModelRegistry]:
    """Yield a registry that answers at its `url`."""
    registry = ModelRegistry()

    class Handler(BaseHTTPRequestHandler):
        def _reply(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            try:
                status, value = registry.answer(self.command, self.path, self.headers, body)
                if (key := (self.command, self.path.rpartition("/")[2])) in registry.lost_answers:
                    registry.lost_answers.remove(key)
                    status, value = 500, {"code": "500", "message": "lost"}
            except Refusal as refusal:
                status, value = refusal.status, {"code": str(refusal.status), "message": str(refusal)}
                if refusal.status not in (401, 404, 409) and "planned" not in str(refusal):
                    registry.refusals.append(f"{self.command} {self.path}: {refusal}")
            content = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: Any) -> None:
            pass

    for method in ("GET", "POST", "PATCH"):
        setattr(Handler, f"do_{method}", Handler._reply)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    registry.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield registry
    finally:
        server.shutdown()
        server.server_close()
