"""Stage `export` of a run: its files, when it runs again, and the artifact of its component."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from podscale.components import steps
from podscale.config import RunConfig, dumps, loads
from podscale.errors import ExitCode
from podscale.export import export_model as export_module
from podscale.export.web_runtime import WebRuntime
from podscale.runs import RunDirectory, StageOutcome, read_outcomes, write_outcome
from podscale.runs.stage_outcomes import discard_outcomes, planned_stages
from podscale.stages import local
from tests.support.digits_run import DIGITS, write_digits_set
from tests.support.prediction import write_model_run

DOCUMENT = """
run: {id: small, seed: 3}
input: {image_size: 16}
model: {name: "python:tests.support.user_models:depthwise"}
export: {formats: [safetensors, torchscript], preprocessing: true, images: 40}
"""


@dataclass
class Artifact:
    """Artifact as KFP gives it to a component."""

    path: str
    metadata: dict[str, Any] = field(default_factory=dict)


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    write_digits_set(tmp_path / "shards", count=400)
    return write_model_run(tmp_path, DOCUMENT, DIGITS)


def change(config: RunConfig, *changes: str) -> RunConfig:
    return loads(dumps(config), overrides=list(changes))


def test_the_stage_writes_the_files_once(config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, shards = RunDirectory.for_config(config), str(tmp_path / "shards")
    assert not local.export(config, shards).reused
    assert str(run.exports / "model.torchscript") in capsys.readouterr().out
    assert {path.name for path in run.exports.iterdir()} == {
        name + end for name in ("model.safetensors", "model.torchscript") for end in ("", ".json")
    }
    report = json.loads((run.exports / "model.torchscript.json").read_text())
    assert (report["check"]["images"], report["output"]) == (40, "probabilities")
    assert report["check"]["source"] == f"{shards}/validation"

    written = (run.exports / "model.torchscript").stat().st_mtime_ns
    assert local.export(config, shards).reused
    assert local.export(change(config, "claim.top1=0.5"), shards).reused
    assert (run.exports / "model.torchscript").stat().st_mtime_ns == written
    assert not local.export(change(config, "export.images=7"), shards).reused
    assert json.loads((run.exports / "model.torchscript.json").read_text())["check"]["images"] == 7
    (run.exports / "model.safetensors").unlink()
    assert not local.export(change(config, "export.images=7"), shards).reused


def test_another_evaluation_and_not_another_report_discards_the_outcome(config: RunConfig) -> None:
    path = RunDirectory.for_config(config).outcome
    for stage in ("train", "evaluate", "report", "export"):
        write_outcome(path, StageOutcome(stage, 0))
    discard_outcomes(config, "report")
    assert list(read_outcomes(path)) == ["train", "evaluate", "export"]
    discard_outcomes(config, "evaluate")
    assert list(read_outcomes(path)) == ["train"]


def test_a_document_without_formats_has_no_stage(config: RunConfig) -> None:
    assert planned_stages(config) == ("shard", "train", "evaluate", "report", "export")
    assert planned_stages(change(config, "export.formats=[]")) == ("shard", "train", "evaluate", "report")


def test_the_component_hands_on_the_files_with_metadata(config: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps({"location": str(tmp_path / "shards")}))
    exported = Artifact(str(tmp_path / "artifact"))
    steps.export(config.model_dump_json(), Artifact(str(tmp_path / "manifest.json")), exported)
    run = RunDirectory.for_config(config)
    for name in ("model.safetensors", "model.torchscript"):
        assert (tmp_path / "artifact" / name).read_bytes() == (run.exports / name).read_bytes()
    report = json.loads((run.exports / "model.torchscript.json").read_text())
    metadata = exported.metadata
    assert metadata["model.torchscript: sha256"] == report["sha256"]
    assert (metadata["run"], metadata["weights_sha256"]) == ("small", report["weights_sha256"])
    assert (metadata["framework"], metadata["location"]) == ("safetensors+torchscript", str(run.exports))
    json.dumps(metadata)


def test_the_stage_links_its_page_in_the_report(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxscript")
    monkeypatch.setattr(export_module, "load_web_runtime", lambda: WebRuntime(b"module", b"program", "small 1.2.3"))
    (tmp_path / "manifest.json").write_text(json.dumps({"location": str(tmp_path / "shards")}))
    shard_set, page, card = (Artifact(str(tmp_path / name)) for name in ("manifest.json", "page.html", "card.md"))
    config = change(config, "export.formats=[html]", "export.images=8")
    document, run = config.model_dump_json(), RunDirectory.for_config(config)
    steps.report(document, shard_set, page, card)
    assert "demo.html" not in run.report.read_text().partition("The resolved run document")[0]
    exported, shown = (Artifact(str(tmp_path / name)) for name in ("exported", "shown"))
    steps.export(document, shard_set, exported, shown)
    assert Path(shown.path).read_bytes() == (run.exports / "demo.html").read_bytes()
    check = json.loads((run.exports / "demo.html.json").read_text())
    assert shown.metadata["file"] == "demo.html"
    for key in ("run", "sha256", "weights_sha256"):
        assert shown.metadata[key] == check[key]
    assert '<a href="export/demo.html">' in run.report.read_text()
    steps.report(document, shard_set, page, card)  # as a pipeline that runs again does
    assert '<a href="export/demo.html">' in run.report.read_text()
    assert Path(page.path).read_text().count("<iframe") == 0
    assert "export/demo.html" not in Path(page.path).read_text()
    assert "<code>export</code>" in Path(page.path).read_text()


def test_of_two_pages_viewers_show_the_one_in_fp32(config: RunConfig) -> None:
    pages = {
        formats: change(config, f"export.formats=[{formats}]").export.page
        for formats in ("html-int8, onnx, html", "onnx, html-int8", "html", "onnx", "")
    }
    assert list(pages.values()) == ["demo.html", "demo.int8.html", "demo.html", None, None]


def test_the_component_with_a_page_refuses_a_document_without_one(
    config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    artifacts = (Artifact(str(tmp_path / name)) for name in ("manifest.json", "exported", "page"))
    with pytest.raises(SystemExit) as ended:
        steps.export(config.model_dump_json(), *artifacts)
    assert ended.value.code == ExitCode.BAD_INPUT
    assert "export.formats: " in capsys.readouterr().err
    assert not RunDirectory.for_config(config).exports.exists()
