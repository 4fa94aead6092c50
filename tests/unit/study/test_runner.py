"""Trials in one pod: their printed results, their errors, one builder of the shard set. Trials with an ensemble."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from podscale.components import steps
from podscale.config import RunConfig
from podscale.errors import ExitCode, PodscaleError
from podscale.evaluation.history import parse_history
from podscale.runs import is_held
from podscale.study import StudyDocument, trial
from podscale.study.grid import TrialGrid
from podscale.study.records import RecordStore, TrialRecord
from podscale.study.runner import SHARDS_LEASE, StudyRunner, run_in_pod


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StudyDocument:
    """Return a study of one series, whose trials end in turn: done, diverged, failed."""

    def run(self: StudyRunner) -> None:
        assert self.series is not None
        (trial, *_) = self.grid.due_trials(self.records.get, self.series)
        self.on_trial_end(trial, TrialRecord(trial.key, "done", {}, 1, top1=0.5), "")
        self.on_trial_end(trial, TrialRecord(trial.key, "diverged", {}, 1), "")
        self.failures[trial.name] = "exit code 1: no memory"
        self.on_trial_end(trial, None, self.failures[trial.name])

    def prepare(self: StudyRunner) -> None:
        assert is_held(self.study_directory / SHARDS_LEASE)

    monkeypatch.setattr(StudyRunner, "prepare", prepare)
    monkeypatch.setattr(StudyRunner, "run", run)
    return StudyDocument.model_validate(
        {"name": "tiny", "run": {}, "seeds": [1], "set": {"run.workspace": str(tmp_path)}}
    )


def test_each_end_is_printed_and_a_failure_is_an_error(study: StudyDocument, capsys: Any) -> None:
    grid = TrialGrid(study)
    with pytest.raises(PodscaleError) as failed:
        run_in_pod(grid, grid.series[:1], field="trial")
    results = [line.rpartition(": ")[2] for line in capsys.readouterr().out.splitlines()]
    assert results == ["top-1 50.00%", "diverged", "no memory"]
    assert failed.value.field == "trial"


def test_the_pipeline_s_task_runs_its_series_so(study: StudyDocument, capsys: Any) -> None:
    with pytest.raises(SystemExit) as exited:
        steps.cells(study.model_dump_json(), 0)
    assert exited.value.code == ExitCode.FAILED
    assert "top-1 50.00%" in capsys.readouterr().out


def test_a_trial_with_an_ensemble_trains_its_members_and_evaluates_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ensemble = {"cycles": [4, 3], "collapse": {"epochs": 1.5}}
    run = {"run": {"workspace": str(tmp_path), "id": "r"}, "train": {"epochs": 7}, "ensemble": ensemble}
    config = RunConfig.model_validate(StudyDocument(name="s", run=run).config({}).model_dump())
    path = tmp_path / "document.json"
    path.write_text(config.model_dump_json())
    done: list[tuple[str, str]] = []
    for stage in ("train", "evaluate"):
        monkeypatch.setattr(trial.local, stage, lambda one, shards, stage=stage: done.append((stage, one.run.id)))
    monkeypatch.setattr(trial.processes, "exit_with_process", lambda parent: None)
    assert trial.run_trial([str(path), "shards", "1"]) == ExitCode.DONE
    assert done == [("train", "r"), ("train", "r-c0"), ("train", "r-c1"), ("evaluate", "r")]
    assert [directory.name for directory in trial.trial_directories(config)] == ["r", "r-c0", "r-c1"]


def test_an_ensembles_record_has_the_score_of_the_members_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = {"run": {"workspace": str(tmp_path)}, "train": {"epochs": 7}, "ensemble": {"cycles": [4, 3]}}
    due = TrialGrid(StudyDocument(name="s", run=run, seeds=(1,))).due_trials(lambda key: None)
    lines = (
        {"kind": "step", "step": 3, "epoch": 7.0, "loss": 1.1, "time": 3.0},
        {"kind": "evaluation", "step": 3, "epoch": 7.0, "top1": 0.6, "top5": 0.9, "loss": 1.0, "time": 4.0},
    )
    history = parse_history([json.dumps(line).encode() for line in lines])
    members = [SimpleNamespace(answered=SimpleNamespace(top1=value)) for value in (0.61, 0.62)]
    evaluation = SimpleNamespace(scores=SimpleNamespace(top1=0.65, loss=0.9), ensemble=SimpleNamespace(members=members))
    monkeypatch.setattr(trial, "read_evaluation", lambda path: evaluation)
    record = trial.build_record(due[0], "done", "", history, images=100)
    assert (record.top1, record.loss, record.members) == (0.65, 0.9, (0.61, 0.62))
    assert record.curve[-1].top1 == 0.6, "the curve is that of the run in cycles"
    store = RecordStore(str(tmp_path))
    store.add(record)
    assert RecordStore(str(tmp_path)).get(record.cell) == record
