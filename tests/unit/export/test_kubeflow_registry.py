"""Exported files in a Kubeflow Model Registry, against the rules of its OpenAPI document (no real registry)."""

import errno
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from podscale.config import RunConfig, dumps, loads
from podscale.export import model_registry_client
from podscale.export.export_model import export_model
from podscale.export.export_options import ExportOptions
from podscale.export.export_result import Export
from podscale.export.kubeflow_registry import RegistrationError, register_in_kubeflow, workspace_uri
from podscale.export.model_registry_client import RegistryError
from podscale.runs import RunDirectory
from podscale.stages import local
from podscale.util.files import file_sha256
from tests.support.digits_run import DIGITS, write_digits_set
from tests.support.model_registry import ModelRegistry, model_registry
from tests.support.ports import free_port
from tests.support.prediction import write_model_run
from tests.support.refusals import Refusal, refused

DOCUMENT = """
run: {{id: small, seed: 3}}
input: {{image_size: 16}}
model: {{name: "python:tests.support.user_models:depthwise"}}
export:
  formats: [torchscript, safetensors]
  images: 40
  kubeflow: {{address: "{url}", model: digits & co}}
"""


@pytest.fixture
def registry() -> Iterator[ModelRegistry]:
    with model_registry() as server:
        yield server
        assert server.refusals == []


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PODSCALE_MODEL_REGISTRY_TOKEN", "KF_PIPELINES_SA_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(model_registry_client, "wait_exponential", lambda **_: lambda _: 0.0)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, list[Export]]:
    """Document of a run and its two exported files, which tests register and do not change."""
    config = write_model_run(tmp_path_factory.mktemp("exports"), DOCUMENT.format(url="http://registry"), DIGITS)
    run = RunDirectory.for_config(config).path
    formats = ("torchscript", "safetensors")
    return config, [export_model(run, ExportOptions(format=name, limit=10)) for name in formats]


@pytest.fixture
def config(exported: tuple[RunConfig, list[Export]], registry: ModelRegistry) -> RunConfig:
    return change(exported[0], f"export.kubeflow.address={registry.url}")


@pytest.fixture
def exports(exported: tuple[RunConfig, list[Export]]) -> list[Export]:
    return exported[1]


def change(config: RunConfig, *changes: str) -> RunConfig:
    return loads(dumps(config), overrides=list(changes))


def properties(entry: dict[str, Any]) -> dict[str, Any]:
    return {
        name: next(v for k, v in value.items() if k != "metadataType")
        for name, value in entry["customProperties"].items()
    }


@contextmanager
def unregistered(status: int | None = None) -> Iterator[Refusal]:
    """Expect a RegistrationError in the block, with the HTTP status of the registry."""
    with refused("Kubeflow Model Registry", field="export.kubeflow.address", kind=RegistrationError) as refusal:
        yield refusal
    assert isinstance(refusal.error.__cause__, RegistryError)
    assert refusal.error.__cause__.status == status


def state_of(failure: Refusal) -> tuple[str, int | None]:
    """Return the version that a failed registration left, and the number of its files."""
    assert isinstance(failure.error, RegistrationError)
    return failure.error.version, failure.error.registered


@contextmanager
def only_reads(registry: ModelRegistry) -> Iterator[None]:
    """Expect that the block changes nothing in the registry."""
    before = len(registry.requests)
    yield
    assert {method for method, _ in registry.requests[before:]} == {"GET"}


def root_cause(error: BaseException) -> BaseException:
    """Return the error that began the chain."""
    return error if error.__cause__ is None else root_cause(error.__cause__)


def test_the_stage_registers_its_files_once(
    registry: ModelRegistry, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_model_run(tmp_path, DOCUMENT.format(url=f"{registry.url}/"), DIGITS)
    shards = str(tmp_path / "shards")
    write_digits_set(tmp_path / "shards", count=400)
    local.export(config, shards)
    (model,), (version,) = registry.values("model"), registry.values("version")
    out = capsys.readouterr().out
    for text in (version["name"], "digits & co", f"{registry.url}/", "model.safetensors, model.torchscript"):
        assert text in out
    run = RunDirectory.for_config(config)
    report = json.loads((run.exports / "model.torchscript.json").read_text())
    assert (model["name"], version["registeredModelId"]) == ("digits & co", model["id"])
    described = properties(version)
    assert (described["run"], described["formats"]) == ("small", "torchscript,safetensors")
    assert described["top1"] == pytest.approx(report["check"]["reference_top1"])
    assert described["weights_sha256"] == report["weights_sha256"]
    assert len(described["data_fingerprint"]) == 16

    weights, program = registry.values("artifact")
    assert program["name"] == f"{version['name']}/model.torchscript"
    assert (program["modelFormatName"], program["modelFormatVersion"]) == ("pytorch", "1")
    assert program["modelSourceId"] == "small"
    assert (weights["modelFormatName"], "modelFormatVersion" in weights) == ("safetensors", False)
    assert properties(program)["sha256"] == report["sha256"]
    kept = Path(program["uri"].removeprefix("file://"))
    assert kept.parent.parent == run.exports / "versions"
    assert file_sha256(kept) == report["sha256"]

    run.stage_inputs.unlink()  # the stage runs again
    with only_reads(registry):
        local.export(config, shards)
    assert version["name"] in capsys.readouterr().out
    assert [len(registry.values(kind)) for kind in registry.entries] == [1, 1, 2]
    assert file_sha256(kept) == properties(registry.values("artifact")[1])["sha256"]

    file = run.model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    local.export(config, shards)
    assert [len(registry.values(kind)) for kind in registry.entries] == [1, 2, 4]
    assert kept.read_bytes() != (run.exports / "model.torchscript").read_bytes()


def test_an_interrupted_registration_is_reported_and_completed(
    config: RunConfig, exports: list[Export], registry: ModelRegistry
) -> None:
    registry.faults[("POST", "artifacts")] = [422]
    with unregistered(422) as failure:
        register_in_kubeflow(config, exports)
    assert "planned by the test" in failure.text, "the answer of the registry"
    (version,) = registry.values("version")
    assert state_of(failure) == (version["name"], 0)
    for text in (version["name"], "digits & co", "0 of 2"):
        assert text in failure.text
    assert "model.safetensors, model.torchscript" in register_in_kubeflow(config, exports)
    assert [len(registry.values(kind)) for kind in registry.entries] == [1, 1, 2]

    registry.faults[("GET", "artifacts")] = [400]
    with unregistered(400) as failure:
        register_in_kubeflow(config, exports)
    assert state_of(failure) == (version["name"], None)

    with model_registry() as other:
        changed = change(config, f"export.kubeflow.address={other.url}")
        other.faults[("POST", "registered_models")] = [400]
        with unregistered(400) as failure:
            register_in_kubeflow(changed, exports)
        assert state_of(failure) == ("", None)


def test_an_outage_is_retried_and_a_race_finds_the_entry_of_the_other(
    config: RunConfig, exports: list[Export], registry: ModelRegistry
) -> None:
    registry.faults[("GET", "registered_model")] = [503, 500]
    registry.lost_answers.append(("POST", "versions"))
    assert "model.torchscript" in register_in_kubeflow(config, exports)
    assert [len(registry.values(kind)) for kind in registry.entries] == [1, 1, 2]
    assert registry.requests.count(("POST", "/registered_models/1/versions")) == 2


@pytest.mark.parametrize(
    ("status", "hint"),
    [(503, ""), (403, "PODSCALE_MODEL_REGISTRY_TOKEN"), (302, "KF_PIPELINES_SA_TOKEN_PATH")],
)
def test_refusals_are_explained(
    config: RunConfig, exports: list[Export], registry: ModelRegistry, status: int, hint: str
) -> None:
    registry.faults[("GET", "registered_model")] = [status] * 5
    with unregistered(status) as failure:
        register_in_kubeflow(config, exports)
    assert failure.error.got == registry.url
    assert state_of(failure) == ("", None)
    assert hint in failure.error.hint
    assert len(registry.requests) == (3 if status == 503 else 1)


def test_a_registry_that_is_away_fails_after_the_files(config: RunConfig, exports: list[Export]) -> None:
    away = change(config, f"export.kubeflow.address=http://127.0.0.1:{free_port()}")
    with unregistered() as failure:
        register_in_kubeflow(away, exports)
    assert os.strerror(errno.ECONNREFUSED) in failure.text
    assert exports[0].path.exists()


def test_a_registry_that_never_answers_is_given_up(
    config: RunConfig, exports: list[Export], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_registry_client, "TIMEOUT_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with unregistered() as failure:
            register_in_kubeflow(change(config, f"export.kubeflow.address={url}"), exports)
    assert isinstance(root_cause(failure.error), TimeoutError)


def test_the_token_comes_from_the_environment_or_a_file(
    config: RunConfig,
    exports: list[Export],
    registry: ModelRegistry,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registry.token = "secret"
    with unregistered(401):
        register_in_kubeflow(config, exports)
    (tmp_path / "token").write_text("secret\n")
    monkeypatch.setenv("KF_PIPELINES_SA_TOKEN_PATH", str(tmp_path / "token"))
    assert "model.torchscript" in register_in_kubeflow(config, exports)
    monkeypatch.setenv("KF_PIPELINES_SA_TOKEN_PATH", str(tmp_path / "absent"))
    with refused(field="KF_PIPELINES_SA_TOKEN_PATH", got=str(tmp_path / "absent")):
        register_in_kubeflow(config, exports)
    monkeypatch.setenv("PODSCALE_MODEL_REGISTRY_TOKEN", "secret")
    with only_reads(registry):
        register_in_kubeflow(config, exports)


def test_another_address_of_the_workspace_changes_the_artifacts(
    config: RunConfig, exports: list[Export], registry: ModelRegistry
) -> None:
    register_in_kubeflow(config, exports)
    changes = ("export.kubeflow.workspace_uri=s3://bucket/ws", "export.kubeflow.storage_key=store")
    assert "model.torchscript" in register_in_kubeflow(change(config, *changes), exports)
    assert [method for method, _ in registry.requests if method == "PATCH"] == ["PATCH"] * 2
    artifact = registry.values("artifact")[1]
    path = artifact["uri"].removeprefix("s3://bucket/")
    assert path.startswith("ws/runs/small/export/versions/")
    assert (artifact["storageKey"], artifact["storagePath"]) == ("store", path)
    assert [len(registry.values(kind)) for kind in registry.entries] == [1, 1, 2]


def test_a_page_is_a_document_and_the_first_format_the_newest_model(
    config: RunConfig, exports: list[Export], registry: ModelRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Export, "opset", 20)
    page = exports[1].path.with_name("demo.html")
    os.link(exports[1].path, page)
    files = [*exports, replace(exports[1], path=page, format="html")]
    register_in_kubeflow(config, files)
    names = [(entry["artifactType"], entry["name"].rpartition("/")[2]) for entry in registry.values("artifact")]
    assert names[0] == ("doc-artifact", "demo.html")
    assert names[-1] == ("model-artifact", "model.torchscript")
    assert properties(registry.values("artifact")[0])["opset"] == "20"
    with only_reads(registry):  # the list has two pages
        register_in_kubeflow(config, files)
    page.unlink()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (["run.workspace=/ws/a b"], "file:///ws/a%20b"),
        (["run.workspace=/ws", "launch.cluster.workspace_claim=claim"], "pvc://claim"),
        (["run.workspace=/mnt/b/x", "launch.cluster.volumes=[{path: /mnt/b, bucket: models}]"], "gs://models/x"),
        (["run.workspace=/mnt/c", "launch.cluster.volumes=[{path: /mnt/c, claim: shared}]"], "pvc://shared"),
        (["run.workspace=/mnt/cc", "launch.cluster.volumes=[{path: /mnt/c, claim: shared}]"], "file:///mnt/cc"),
    ],
)
def test_the_workspace_has_a_url(changes: list[str], expected: str) -> None:
    assert workspace_uri(loads("", overrides=changes)) == expected


@pytest.mark.parametrize(
    ("section", "field"),
    [
        ("{formats: [onnx], kubeflow: {address: 'http://r:80'}}", "export.kubeflow.model"),
        ("{formats: [onnx], kubeflow: {model: m}}", "export.kubeflow.address"),
        ("{kubeflow: {address: 'http://r:80', model: m}}", "export.kubeflow.model"),
        ("{formats: [onnx], kubeflow: {address: 'r:80', model: m}}", "export.kubeflow.address"),
        ("{formats: [onnx], kubeflow: {address: 'http://r:80', model: a/b}}", "export.kubeflow.model"),
        (
            "{formats: [onnx], kubeflow: {address: 'http://r', model: m, storage_key: k}}",
            "export.kubeflow.workspace_uri",
        ),
    ],
)
def test_bad_options_are_refused(section: str, field: str) -> None:
    with refused(field=field):
        loads(f"export: {section}")


def test_the_double_refuses_what_the_document_forbids() -> None:
    bad: list[tuple[str, dict[str, Any]]] = [
        ("/registered_models", {"state": "LIVE"}),
        ("/registered_models", {"name": "a", "title": "b"}),
        ("/registered_models", {"name": "a", "customProperties": {"n": {"string_value": "x"}}}),
        (
            "/registered_models",
            {"name": "a", "customProperties": {"n": {"metadataType": "MetadataIntValue", "int_value": 3}}},
        ),
        ("/models", {"name": "a"}),
    ]
    with model_registry() as server:
        client = model_registry_client.ModelRegistryClient(server.url, "x")
        for path, body in bad:
            with pytest.raises(RegistryError):
                client.create(path, body)
        assert len(server.refusals) == len(bad)
        assert server.values("model") == []


@pytest.mark.parametrize("section", ["mlflow_model: softmax 1", "kubeflow: {address: 'http://r:80', model: softmax 1}"])
def test_names_may_begin_with_any_letter(section: str) -> None:
    assert "softmax 1" in dumps(loads(f"export: {{formats: [onnx], {section}}}"))
