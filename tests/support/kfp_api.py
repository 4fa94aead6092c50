"""KFP backend in this process: the part of its v2beta1 HTTP API that uploads, runs and schedules.

It replaces KFP's server, which was not available. Paths, fields and errors follow the server's source at 2.17
(backend/src/apiserver: server, template/v2_template.go) and kfp's own generated client, which the tests use. It stores
what it receives and parses packages as strictly as the server.
"""

import json
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.parser import BytesParser
from email.policy import HTTP
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml
from google.protobuf import json_format

from podscale.util.libyaml import SafeLoader

BASE = "/apis/v2beta1"
Answer = tuple[int, dict[str, Any]]


@dataclass
class Store:
    """Content of the backend by id, and its behaviour."""

    pipelines: dict[str, dict[str, Any]] = field(default_factory=dict)
    versions: dict[str, dict[str, Any]] = field(default_factory=dict)
    experiments: dict[str, dict[str, Any]] = field(default_factory=dict)
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    recurringruns: dict[str, dict[str, Any]] = field(default_factory=dict)
    packages: list[list[dict[str, Any]]] = field(default_factory=list)
    """YAML documents of the accepted packages."""
    multi_user: bool = False
    token: str = ""
    """Token that every request must have, if set."""
    refuse: int = 0
    """Status of every response except health, if set."""
    failures: int = 0
    """Number of next responses that are 503."""
    script: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    """States of a run and its tasks at each poll; the last one remains."""
    tasks: list[dict[str, Any]] = field(default_factory=list)
    """Tasks of the last poll."""
    requests: list[tuple[str, str]] = field(default_factory=list)
    has_tasks_request: bool = False
    """Answer `/runs/<id>/tasks` and leave run_details empty, as the backend without ML Metadata does."""
    task_details: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Further fields of the answer to `/runs/<id>/tasks`, by task."""
    workflow: dict[str, Any] = field(default_factory=dict)
    """Argo's workflow of a run, which the first version of the API returns."""


class Refusal(Exception):
    """Error response in the form of grpc-gateway."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class KfpApi:
    """Backend at `url` until it is closed."""

    def __init__(self) -> None:
        self.store = Store()
        store = self.store

        class Handler(_Handler):
            held = store

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextmanager
def kfp_api() -> Iterator[KfpApi]:
    api = KfpApi()
    try:
        yield api
    finally:
        api.close()


class _Handler(BaseHTTPRequestHandler):
    held: Store

    def do_GET(self) -> None:
        self._answer("GET")

    def do_POST(self) -> None:
        self._answer("POST")

    def do_DELETE(self) -> None:
        self._answer("DELETE")

    def log_message(self, *_: Any) -> None:
        """Suppress the request log."""

    def _answer(self, method: str) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        self.held.requests.append((method, url.path))
        try:
            self._admit(url.path)
            status, content = _route(self.held, method, url.path.removeprefix(BASE), query, body, self.headers)
        except Refusal as refusal:
            status, content = refusal.status, {"error": str(refusal), "code": 3, "message": str(refusal)}
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _admit(self, path: str) -> None:
        if not path.startswith((BASE, "/apis/v1beta1/runs/")):
            raise Refusal(404, "Not Found")
        if self.held.token and self.headers.get("Authorization") != f"Bearer {self.held.token}":
            raise Refusal(401, "Request header error: there is no user identity header.")
        if self.held.failures:
            self.held.failures -= 1
            raise Refusal(503, "upstream connect error or disconnect/reset before headers")
        if self.held.refuse and not path.endswith("/healthz"):
            raise Refusal(self.held.refuse, "Unauthorized access: User 'ada' is not authorized with reason: ")


def _route(store: Store, method: str, path: str, query: dict[str, str], body: bytes, headers: Any) -> Answer:
    parts = path.strip("/").split("/")
    match method, parts:
        case "GET", ["healthz"]:
            return 200, {"multi_user": store.multi_user}
        case "GET", ["pipelines"]:
            return _listed(store.pipelines, "pipelines", query)
        case "POST", ["pipelines"]:
            return _create_pipeline(store, json.loads(body))
        case "POST", ["pipelines", "upload_version"]:
            return _upload(store, query, _uploaded_file(body, headers))
        case "GET", ["pipelines", owner, "versions"]:
            pipeline_versions = {
                key: version for key, version in store.versions.items() if version["pipeline_id"] == owner
            }
            return _listed(pipeline_versions, "pipeline_versions", query)
        case "GET", ["experiments"]:
            return _listed(store.experiments, "experiments", query)
        case "POST", ["experiments"]:
            return _keep(store.experiments, "experiment_id", json.loads(body))
        case "POST", ["runs"]:
            run = json.loads(body)
            _check_parameters(store, run)
            return _keep(store.runs, "run_id", {**run, "state": "PENDING"})
        case "GET", ["runs", run_id]:
            return _look(store, run_id)
        case "GET", ["runs", run_id, "tasks"] if store.has_tasks_request:
            return _list_tasks(store, query)
        case "GET", ["apis", "v1beta1", "runs", run_id] if store.workflow:
            return 200, {"run": {"id": run_id}, "pipeline_runtime": {"workflow_manifest": json.dumps(store.workflow)}}
        case "GET", ["recurringruns"]:
            return _listed(store.recurringruns, "recurringRuns", query)
        case "POST", ["recurringruns"]:
            run = json.loads(body)
            _check_parameters(store, run)
            return _keep(store.recurringruns, "recurring_run_id", run)
        case "DELETE", ["recurringruns", schedule]:
            del store.recurringruns[schedule]
            return 200, {}
    raise Refusal(404, "Not Found")


def _create_pipeline(store: Store, pipeline: dict[str, Any]) -> Answer:
    same = [
        p
        for p in store.pipelines.values()
        if (p["name"], p.get("namespace")) == (pipeline["name"], pipeline.get("namespace"))
    ]
    if same:
        raise Refusal(409, f"Failed to create a new pipeline. The name {pipeline['name']} already exists")
    return _keep(store.pipelines, "pipeline_id", pipeline)


def _upload(store: Store, query: dict[str, str], package: bytes) -> Answer:
    if query.get("pipelineid") not in store.pipelines:
        raise Refusal(400, "Failed to create a pipeline version")
    versions = [v for v in store.versions.values() if v["pipeline_id"] == query["pipelineid"]]
    if query["name"] in [version["name"] for version in versions]:
        raise Refusal(409, "Failed to create a pipeline version")
    store.packages.append(check_package(package.decode()))
    version = {"pipeline_id": query["pipelineid"], "name": query["name"], "display_name": query["name"]}
    return _keep(store.versions, "pipeline_version_id", {**version, "package": len(store.packages) - 1})


def check_package(text: str) -> list[dict[str, Any]]:
    """Return the documents of a package. Raises Refusal if the server would reject it."""
    from kfp.kubernetes import kubernetes_executor_config_pb2 as executor_config  # here: kfp takes a second to load
    from kfp.pipeline_spec import pipeline_spec_pb2

    documents = list(yaml.load_all(text, Loader=SafeLoader))
    try:
        spec = json_format.ParseDict(documents[0], pipeline_spec_pb2.PipelineSpec())
        for document in documents[1:]:
            json_format.ParseDict(document, pipeline_spec_pb2.PlatformSpec())
            for executor in document["platforms"]["kubernetes"]["deploymentSpec"]["executors"].values():
                json_format.ParseDict(executor, executor_config.KubernetesExecutorConfig())
    except json_format.ParseError as error:
        raise Refusal(400, f"invalid v2 pipeline spec: {error}") from error
    if spec.schema_version != "2.1.0" or not spec.pipeline_info.name:
        raise Refusal(400, "KFP only supports schema version 2.1.0")
    return documents


def _check_parameters(store: Store, run: dict[str, Any]) -> None:
    reference = run["pipeline_version_reference"]
    version = store.versions.get(reference["pipeline_version_id"])
    if version is None or version["pipeline_id"] != reference["pipeline_id"]:
        raise Refusal(404, f"PipelineVersion {reference['pipeline_version_id']} not found")
    known = store.packages[version["package"]][0]["root"].get("inputDefinitions", {}).get("parameters", {})
    for name in run["runtime_config"].get("parameters", {}):
        if name not in known:
            raise Refusal(400, f"Invalid input error: parameter {name} is not defined in the pipeline")


def _look(store: Store, run_id: str) -> Answer:
    if run_id not in store.runs:
        raise Refusal(404, f"Run {run_id} not found")
    run = store.runs[run_id]
    if store.script:
        state, tasks = store.script[0] if len(store.script) == 1 else store.script.pop(0)
        store.tasks = [{"task_id": name, "display_name": name, "state": how} for name, how in tasks.items()]
        run.update(state=state, **({} if store.has_tasks_request else {"run_details": {"task_details": store.tasks}}))
    return 200, run


def _list_tasks(store: Store, query: dict[str, str]) -> Answer:
    """Return one task of a run a page."""
    index = int(query.get("page_token") or 0)
    page = [{**task, **store.task_details.get(task["display_name"], {})} for task in store.tasks[index : index + 1]]
    more = {"next_page_token": str(index + 1)} if index + 1 < len(store.tasks) else {}
    return 200, {"tasks": page, "total_size": len(store.tasks), **more}


def _keep(shelf: dict[str, dict[str, Any]], key: str, content: dict[str, Any]) -> Answer:
    item = {**content, key: str(uuid.uuid4()), "created_at": "2026-11-22T00:00:00Z"}
    shelf[item[key]] = item
    return 200, item


def _listed(shelf: dict[str, dict[str, Any]], name: str, query: dict[str, str]) -> Answer:
    """Return the objects that filter and namespace select, the newest first; no list if there are none."""
    predicates = json.loads(query.get("filter") or "{}").get("predicates", [])
    names = [predicate["stringValue"] for predicate in predicates if predicate["key"] == "display_name"]
    items = [
        item
        for item in reversed(shelf.values())
        if all(item.get("display_name") == display_name for display_name in names)
        and ("namespace" not in query or item.get("namespace") in (query["namespace"], None))
    ]
    return 200, {name: items, "total_size": len(items)} if items else {}


def _uploaded_file(body: bytes, headers: Any) -> bytes:
    """Return the `uploadfile` of a multipart form."""
    form = BytesParser(policy=HTTP).parsebytes(
        b"Content-Type: " + headers["Content-Type"].encode() + b"\r\n\r\n" + body
    )
    parts = {part.get_param("name", header="content-disposition"): part for part in form.iter_parts()}
    return bytes(parts["uploadfile"].get_payload(decode=True))
