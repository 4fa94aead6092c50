"""Trials of a study in one pod: their printed results, their errors, and one builder of the shard set."""

from pathlib import Path
from typing import Any

import pytest

from podscale.components import steps
from podscale.errors import ExitCode, PodscaleError
from podscale.runs import is_held
from podscale.study import StudyDocument
from podscale.study.grid import TrialGrid
from podscale.study.pod_trials import SHARDS_LEASE, run_in_pod
from podscale.study.records import TrialRecord
from podscale.study.runner import StudyRunner


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
