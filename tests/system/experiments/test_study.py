"""A real study: trials that train, one that diverges, a kill in the middle, and the same command until it is done."""

import csv
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests.support.polling import until

STUDY = """
name: tiny
title: A tiny study
run:
  data: {source: digits, shard_bytes: 1048576}
  input: {image_size: 8, crop: {scale: [0.7, 1.0], flip: 0.0}}
  model: {name: resnet18, stem: small, width: 8}
  train:
    epochs: 2
    max_nonfinite: 0
    schedule: {name: constant}
  evaluate: {crop_fraction: 1.0, every_epochs: 1}
  checkpoint: {every_epochs: 0}
  launch: {processes: 1, threads: 1}
set: {run.workspace: WORKSPACE}
seeds: [1]
grid: {train.global_batch: [256, 1024]}
target: 0.05
variants:
  - name: sane
    learning_rate: {at: 0.05}
  - name: absurd
    learning_rate: {at: 1.0e+18}
"""


def study(path: Path, *options: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "podscale", "study", str(path), "--jobs", "1", *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.slow
@pytest.mark.timeout(1200)  # about 25 s alone; the machine may be busy
def test_a_study_with_a_diverging_trial_is_stopped_and_continued(tmp_path: Path) -> None:
    path, cells = tmp_path / "tiny.yaml", tmp_path / "studies" / "cells"
    path.write_text(STUDY.replace("WORKSPACE", str(tmp_path)))
    stopped = study(path, "--out", str(tmp_path))
    until(lambda: stopped.poll() is not None or any(cells.glob("*.json")), 600)
    stopped.send_signal(signal.SIGTERM)
    output, _ = stopped.communicate(timeout=600)
    assert stopped.returncode == 75, output
    assert "podscale: study " in output
    before = {file.name: file.stat().st_mtime_ns for file in cells.glob("*.json")}
    assert 1 <= len(before) < 4

    elsewhere = study(path, "--out", str(tmp_path), "--set", f"run.workspace={tmp_path / 'other'}", "--results-only")
    assert f"{len(before)} trial" in elsewhere.communicate(timeout=600)[0]
    assert {file.name for file in (tmp_path / "other" / "studies" / "cells").iterdir()} == {*before}

    ended = study(path, "--out", str(tmp_path))
    output, _ = ended.communicate(timeout=600)
    assert ended.returncode == 0, output
    records = {file.name: json.loads(file.read_text()) for file in cells.glob("*.json")}
    assert len(records) == 4
    assert {name: (cells / name).stat().st_mtime_ns for name in before} == before, "finished trials do not run again"
    settings = ("train.schedule.learning_rate", "train.global_batch")
    by_name = {tuple(record["settings"][name] for name in settings): record for record in records.values()}
    for batch in (256, 1024):
        assert by_name[1e18, batch]["ended"] == "diverged"
        assert by_name[0.05, batch]["ended"] == "done"
        assert 0 < by_name[0.05, batch]["top1"] <= 1
    assert by_name[0.05, 1024]["updates"] < by_name[0.05, 256]["updates"]
    assert not list((tmp_path / "runs").iterdir()), "run directories of trials with a record are removed"

    assert not (tmp_path / "tiny.progress.jsonl").exists(), "nothing is left to continue"
    rows = list(csv.DictReader((tmp_path / "tiny.csv").open()))
    assert sorted(row["ended"] for row in rows) == ["diverged", "diverged", "done", "done"]
    text = (tmp_path / "tiny.md").read_text()
    assert "| absurd | 1e+18 |" in text
    assert "0 (1 diverged)" in text
    page = (tmp_path / "tiny.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "<svg" in page


ENSEMBLE = """
  - name: ensemble
    set: {train.epochs: 2, ensemble: {cycles: [1, 1], collapse: {epochs: 1}}}
    learning_rate: {at: 0.05}
"""


@pytest.mark.slow
@pytest.mark.timeout(1200)  # about 25 s alone; the machine may be busy
def test_the_page_has_the_members_of_an_ensemble_beside_their_average(tmp_path: Path) -> None:
    path = tmp_path / "tiny.yaml"
    text = STUDY.replace("WORKSPACE", str(tmp_path)).replace("[256, 1024]", "[256]")
    path.write_text(text.partition("  - name: absurd")[0].rstrip() + ENSEMBLE)
    ended = study(path, "--out", str(tmp_path))
    output, _ = ended.communicate(timeout=600)
    assert ended.returncode == 0, output
    records = [json.loads(file.read_text()) for file in (tmp_path / "studies" / "cells").iterdir()]
    (members,) = (record["members"] for record in records if record["members"])
    assert len(members) == 2
    head, _, *rows = [line for line in (tmp_path / "tiny.md").read_text().splitlines() if line.startswith("|")][:4]
    at = [cell.strip() for cell in head.split("|")].index("top-1 of a member")
    cells = [row.split("|")[at].strip() for row in rows]
    assert cells == ["", f"{50 * sum(members):.2f} %"]
    written = [row["members"] for row in csv.DictReader((tmp_path / "tiny.csv").open())]
    assert written == ["", " ".join(map(str, members))]


PRETRAINING = """
name: other
run: {run}
set:
  run.workspace: WORKSPACE
  data.only_classes: ["5", "6", "7", "8", "9"]
  train.global_batch: 50
  train.schedule.learning_rate: 0.05
seeds: [1]
pretraining:
  - name: small digits
    set: {{data.only_classes: ["0", "1", "2", "3"]}}
variants:
  - name: probe
    start_from: small digits
    set: {{train.freeze: ['*', '!head'], train.freeze_batch_norm: true, data.images_per_class: 20}}
"""


@pytest.mark.slow
@pytest.mark.timeout(1200)  # about 25 s alone; the machine may be busy
def test_a_probe_starts_from_the_pretraining_and_a_later_variant_trains_it_again(tmp_path: Path) -> None:
    path, cells = tmp_path / "other.yaml", tmp_path / "studies" / "cells"
    run = STUDY.partition("run:")[2].partition("set:")[0]
    text = PRETRAINING.format(run=run).replace("WORKSPACE", str(tmp_path))
    path.write_text(text)
    ended = study(path, "--keep-runs")
    output, _ = ended.communicate(timeout=600)
    assert ended.returncode == 0, output
    records = {record["cell"]: record for record in (json.loads(file.read_text()) for file in cells.glob("*.json"))}
    (probe,) = (record for record in records.values() if "train.start_from.run" in record["settings"])
    first = records[probe["settings"]["train.start_from.run"]]
    assert probe["images"] == 5 * 20
    weights, before = (
        load_file(tmp_path / "runs" / one["cell"] / "model" / "model.safetensors") for one in (probe, first)
    )
    changed = {
        name for name in before if weights[name].shape != before[name].shape or (weights[name] != before[name]).any()
    }
    assert changed == {"fc.weight", "fc.bias"}
    assert (len(before["fc.bias"]), len(weights["fc.bias"])) == (4, 5)

    path.write_text(f"{text}  - {{name: fine-tuning, start_from: small digits}}\n")
    shutil.rmtree(tmp_path / "runs")
    ended = study(path)
    output, _ = ended.communicate(timeout=600)
    assert ended.returncode == 0, output
    assert len(list(cells.glob("*.json"))) == 3
    assert "[3/3]" in output
    assert not list((tmp_path / "runs").iterdir()), "the model is removed once no trial is left"
    assert "| small digits | " in (tmp_path / "studies" / "results" / "other" / "other.md").read_text()
