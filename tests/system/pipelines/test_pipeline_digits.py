"""The real pipeline on the digits through `podscale run`: its files, stages that do not run again, refused documents.

Also a stop in the middle of the evaluation, and an ensemble, from one command and of models named by hand.
"""

import json
import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from podscale.config import load
from podscale.runs import RunDirectory, predictions
from podscale.runs.checkpoint.format import complete_entries, replace_manifest
from podscale.telemetry.catalogue import STARTUP_PARTS
from podscale.telemetry.events import filter_replays, read_records
from tests.support.commands import Command, copy_workspace, different, podscale, result, set_options
from tests.support.outcomes import assert_error, reused_stages
from tools import files_reference

ROOT = Path(__file__).resolve().parents[3]
STAGES = ["shard", "train", "evaluate", "report"]


@pytest.fixture
def workspace(calm: Path, tmp_path: Path) -> Path:
    """Copy of the finished run that a test may change."""
    directory = tmp_path / "workspace"
    copy_workspace(calm, directory)
    return directory


def written(run: Path) -> dict[str, int]:
    """Return the times at which the products of a run were written."""
    names = ["model/model.safetensors", "evaluation.json", "predictions.safetensors", "report.html"]
    return {name: (run / name).stat().st_mtime_ns for name in names}


def test_a_run_reports_its_stages_times_and_score(calm: Path) -> None:
    run, out, err = calm / "runs" / "calm", (calm / "calm.out").read_text(), (calm / "calm.err").read_text()
    outcomes = json.loads((run / "outcome.json").read_text())
    assert list(outcomes) == STAGES
    assert all(entry["exit_code"] == 0 and not entry["reused"] and entry["seconds"] > 0 for entry in outcomes.values())
    ended = [json.loads(line) for line in out.splitlines()][-1]
    assert (ended["event"], ended["exit_code"], list(ended["stages"])) == ("ended", 0, STAGES)
    assert ended["top1"] == json.loads((run / "evaluation.json").read_text())["figures"]["top1"]
    table = err[err.index("\nstage ") :]
    rows = dict(re.findall(r"^(\w+) +([\d.]+)", table, re.MULTILINE))
    assert list(rows) == [*STAGES, "pipeline", "total"]
    assert sum(float(rows[name]) for name in [*STAGES, "pipeline"]) == pytest.approx(float(rows["total"]), abs=0.4)
    assert re.search(r"^top-1 \d\d\.\d\d%, report: runs/calm/report\.html$", err, re.MULTILINE)
    assert [line for line in err.splitlines() if line.startswith("[")] == [
        f"[{number}/4] {stage}" for number, stage in enumerate(STAGES, 1)
    ]
    assert len(re.findall(r"^      metrics at http://127\.0\.0\.1:\d+/metrics$", err, re.MULTILINE)) == 3  # stages
    assert not RunDirectory(run).endpoint.exists(), "it has the address of a running server"
    assert "Traceback" not in out + err
    assert "KFP" not in out + err


def test_a_run_leaves_a_model_its_scores_and_a_report(calm: Path) -> None:
    run = RunDirectory(calm / "runs" / "calm")
    evaluation = json.loads(run.evaluation.read_text())
    jsonschema.validate(evaluation, json.loads((ROOT / "podscale/evaluation/evaluation.schema.json").read_text()))
    scores, answers = evaluation["figures"], predictions.read_predictions(run.predictions)
    assert scores["samples"] == len(answers) == len(set(answers.keys.tolist())) == 359
    assert scores["top1"] == np.mean(answers.topk[:, 0] == answers.labels) > 0.3  # chance is 0.1
    assert scores["loss"] == pytest.approx(answers.losses.mean(), rel=1e-5)
    matrix = np.array(evaluation["confusion_matrix"])
    assert np.trace(matrix) == round(scores["top1"] * 359)
    # The evaluation stage loads the exported model and agrees with the training's own last evaluation.
    trained = json.loads((run.model / "model.json").read_text())["training"]["evaluation"]
    assert trained["top1"] == pytest.approx(scores["top1"])
    lines = filter_replays(read_records(run.metrics))
    assert [line["step"] for line in lines if line["kind"] == "step"] == list(range(1, 69))
    assert [line["event"] for line in lines if line.get("event") in ("start", "resumed", "done")] == ["start", "done"]
    (startup,) = [line for line in lines if line.get("event") == "startup"]
    assert [*startup["parts"]] == [part for part in STARTUP_PARTS if part not in ("scheduling", "pull")]
    assert min(startup["parts"][part] for part in ("supervisor", "imports", "build", "compile")) > 0.01
    (goodput,) = [line["seconds"] for line in lines if line.get("event") == "goodput"]
    counted = {part: startup["parts"].pop(part) for part in ("compile", "restore")}
    assert goodput["compile"] == pytest.approx(counted["compile"], abs=0.1)
    assert goodput["init"] == pytest.approx(sum(startup["parts"].values()), abs=0.1)
    card = (run.model / "README.md").read_text()
    for text in ("resnet18", "1438", f"{100 * scores['top1']:.2f}"):
        assert text in card
    assert "<svg" in run.report.read_text()


def test_the_reference_names_every_file(calm: Path) -> None:
    """docs/reference/files.md lists exactly the files that a run writes."""
    run = calm / "runs" / "calm"
    (shard_set,) = (path for path in (calm / "datasets").iterdir() if path.is_dir())
    directories = [(run, files_reference.RUN_FILES), (shard_set, files_reference.SHARD_SET_FILES)]
    directories += [(path, files_reference.CHECKPOINT_FILES) for path in (run / "checkpoints").iterdir()]
    for directory, rows in directories:
        assert files_reference.unknown_files(directory, rows) == []
        assert files_reference.absent_files(directory, rows) == []


def test_outputs_are_typed_artifacts(calm: Path) -> None:
    (tasks,) = (calm / "runs" / "calm" / "pipeline").iterdir()

    def artifact(task: str, name: str) -> dict[str, object]:
        outputs = json.loads((tasks / task / "executor_output.json").read_text())
        metadata: dict[str, object] = outputs["artifacts"][name]["artifacts"][0]["metadata"]
        return metadata

    assert artifact("shard", "shard_set")["train_images"] == 1438
    assert artifact("train", "model")["architecture"] == "resnet18"
    scores = json.loads((calm / "runs/calm/evaluation.json").read_text())["figures"]
    assert artifact("evaluate", "metrics")["top1"] == scores["top1"]
    rows = artifact("evaluate", "confusion")["confusionMatrix"]["rows"]  # type: ignore[index]
    assert sum(sum(row["row"]) for row in rows) == 359
    assert (tasks / "report" / "page").read_bytes() == (calm / "runs/calm/report.html").read_bytes()
    sizes = [path.stat().st_size for path in (tasks / "shard").iterdir()]
    assert max(sizes) < 20_000, "large data went through an artifact"


@pytest.mark.slow
def test_a_second_run_repeats_no_stage_and_another_document_is_refused(workspace: Path) -> None:
    run = workspace / "runs" / "calm"
    before = written(run)
    again = podscale(workspace, "run", "run.yaml", "--set", "run.id=calm")
    assert again.code == 0, again.err
    assert reused_stages(again.err) == STAGES
    assert written(run) == before

    faster = ["run", "run.yaml", "--set", "run.id=calm", "--set", "train.schedule.learning_rate=0.2"]
    stale = podscale(workspace, *faster)
    assert stale.code == 2
    assert re.search(r"train\.schedule\.learning_rate\b.*0\.1.*0\.2", stale.err)
    assert written(run) == before

    short = ["--set", "train.epochs=1", "--set", "train.schedule.warmup_epochs=0", "--set", "launch.processes=1"]
    fresh = podscale(workspace, *faster, *short, "--fresh")
    assert fresh.code == 0, fresh.err
    assert reused_stages(fresh.err) == ["shard"], "the shards depend on the data alone"
    (aside,) = (path for path in (workspace / "runs").iterdir() if path.name.startswith("calm."))
    assert written(aside) == before, "the earlier run is kept"
    assert load(run / "config.yaml").train.schedule.learning_rate == 0.2


@pytest.mark.slow
def test_a_stop_in_the_evaluation_ends_it_and_the_same_command_continues(workspace: Path) -> None:
    run = workspace / "runs" / "calm"
    expected = result(run)
    (run / "evaluation.json").unlink()
    command = Command(workspace, "run", "run.yaml", "--set", "run.id=calm")
    try:
        command.wait_for(lambda: len(command.ranks()) == 2)
        command.process.send_signal(signal.SIGTERM)
        ended = command.end()
    finally:
        command.kill()
    assert ended.code == 75, ended.err
    assert ended.last.startswith("podscale in stage evaluate: ")
    assert not (run / "evaluation.json").exists()
    ended = podscale(workspace, "run", "run.yaml", "--set", "run.id=calm")
    assert ended.code == 0, ended.err
    assert "train" in reused_stages(ended.err)
    assert (run / "evaluation.json").exists()
    assert different(result(run), expected) == []


def test_a_checkpoint_of_another_class_map_is_refused(workspace: Path) -> None:
    run = workspace / "runs" / "calm"
    shutil.rmtree(run / "model")
    for entry in complete_entries(run / "checkpoints"):
        identity = replace(entry.manifest.identity, classes_sha256="0" * 64)
        replace_manifest(entry.path, replace(entry.manifest, identity=identity))
    checkpoints = sorted((run / "checkpoints").rglob("*"))
    ended = podscale(workspace, "train", "run.yaml", "--set", "run.id=calm", "--set", "launch.processes=1")
    assert ended.code == 2
    assert ended.err.count("podscale: ") == 1
    assert re.search(r"class map\b.*0{12}", ended.err)
    assert not (run / "model").exists()
    assert sorted((run / "checkpoints").rglob("*")) == checkpoints


@pytest.mark.slow
def test_an_ensemble_in_one_command_and_its_models_by_hand(calm: Path, tmp_path: Path) -> None:
    shutil.copytree(calm / "datasets", tmp_path / "datasets")
    shutil.copy(calm / "run.yaml", tmp_path)
    changes = [
        "run.id=both",
        "ensemble.cycles=[0.3,0.2]",
        "ensemble.collapse.epochs=0.1",
        "train.epochs=0.5",
        "train.schedule.warmup_epochs=0",
        "evaluate.statistics_images=64",
        "launch.processes=1",
    ]
    ended = podscale(tmp_path, "run", "run.yaml", *set_options(*changes))
    assert ended.code == 0, ended.err
    assert re.search(r"^ +collapse: both-c0, both-c1$", ended.err, re.MULTILINE)
    timed = re.findall(r"^(\w+(?: both-c\d)?) +\d+\.\d +\d+%", ended.err, re.MULTILINE)
    assert timed == ["shard", "train", "collapse both-c0", "collapse both-c1", "evaluate", "report", "pipeline"]
    run = tmp_path / "runs" / "both"
    evaluation = json.loads((run / "evaluation.json").read_text())
    members = evaluation["ensemble"]["members"]
    assert [(m["name"], m["started_from"]) for m in members] == [("both-c0", "both"), ("both-c1", "both")]
    step_epochs = 64 / 1438
    assert [m["started_epoch"] for m in members] == pytest.approx([0.3, 0.5], abs=step_epochs)
    assert evaluation["ensemble"]["epochs"] == pytest.approx(0.5 + 2 * 0.1, abs=3 * step_epochs)
    combined = {one["way"]: one["answered"] for one in evaluation["ensemble"]["combined"]}
    assert list(combined) == ["probabilities", "logits", "weights"]
    assert evaluation["figures"]["loss"] == pytest.approx(combined["probabilities"]["loss"])
    assert re.search(r">both-c1, from epoch 0\.5\d* of both<", (run / "report.html").read_text())

    named = podscale(tmp_path, "evaluate", "runs/both-c0", "runs/both-c1/model", "--set", "evaluate.combine=logits")
    assert named.code == 0, named.err
    (row,) = re.findall(r"^mean of logits .*$", named.out, re.MULTILINE)
    assert f" {100 * combined['logits']['top1']:.2f}" in row
    assert f"{combined['logits']['loss']:.4f} nats" in named.out

    described = tmp_path / "runs/both-c1/model/model.json"
    description = json.loads(described.read_text())
    described.write_text(json.dumps({**description, "classes": [*description["classes"][:-1], "ten"]}))
    refused = podscale(tmp_path, "evaluate", "runs/both-c1", "runs/both-c0")
    assert_error(refused.code, refused.err, "class 9 is 'ten'", field="runs/both-c1/model")
