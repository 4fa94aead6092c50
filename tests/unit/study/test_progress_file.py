"""Progress of an unfinished study: what another workspace takes from the file beside the results."""

from dataclasses import replace
from pathlib import Path

import pytest

from podscale.study import StudyDocument
from podscale.study.grid import TrialGrid
from podscale.study.progress_file import progress_path, read_progress, write_progress
from podscale.study.protocol import protocol_digest, read_launches, record_launch
from podscale.study.records import EvaluationPoint, RecordStore, TrialRecord
from tests.support.refusals import refused


def open_study(workspace: Path) -> tuple[TrialGrid, RecordStore]:
    """Return a sweep of three rates, whose best one decides about two more seeds, and the records of a workspace."""
    rate = {"at": 0.1, "sweep": {"factors": [0.5, 1, 2], "widen": 0}}
    run = {"run": {"workspace": str(workspace)}, "train": {"epochs": 2}}
    document = {"name": "s", "run": run, "seeds": (1, 2, 3), "variants": [{"name": "a", "learning_rate": rate}]}
    grid = TrialGrid(StudyDocument.model_validate(document))
    return grid, RecordStore(grid.workspace)


def finish(grid: TrialGrid, records: RecordStore, trials: int) -> list[TrialRecord]:
    """Record the next trials that are due."""
    done = []
    for trial in grid.due_trials(records.get)[:trials]:
        curve = (EvaluationPoint(3, 1.0, 0.25, None), EvaluationPoint(6, 2.0, 0.5, 1.1))
        done.append(TrialRecord(trial.key, "done", dict(trial.settings), trial.seed, top1=0.5, curve=curve))
        records.add(done[-1])
    return done


def test_another_workspace_continues(tmp_path: Path) -> None:
    grid, records = open_study(tmp_path / "here")
    record_launch(grid.study, records.study_directory("s"))
    done = finish(grid, records, 3) + finish(grid, records, 1)
    write_progress(grid, records, tmp_path)

    other_grid, other_records = open_study(tmp_path / "there")
    assert read_progress(other_grid, other_records, tmp_path) == 4
    assert [other_records.get(record.cell) for record in done] == done
    assert len(other_grid.due_trials(other_records.get)) == 1, "the rate of the sweep is chosen there too"
    launches = read_launches(other_records.study_directory("s"))
    assert [launch.digest for launch in launches] == [protocol_digest(grid.study)]
    assert read_progress(other_grid, other_records, tmp_path) == 0
    assert read_launches(other_records.study_directory("s")) == launches


def test_the_last_trial_removes_the_file(tmp_path: Path) -> None:
    grid, records = open_study(tmp_path / "here")
    assert read_progress(grid, records, tmp_path) == 0
    finish(grid, records, 3)
    write_progress(grid, records, tmp_path)
    assert progress_path(tmp_path, "s").exists()
    finish(grid, records, 9)
    write_progress(grid, records, tmp_path)
    assert not progress_path(tmp_path, "s").exists()


def test_the_workspace_keeps_its_own_record(tmp_path: Path) -> None:
    grid, records = open_study(tmp_path / "here")
    (first, _) = finish(grid, records, 2)
    write_progress(grid, records, tmp_path)
    other_grid, other_records = open_study(tmp_path / "there")
    own = replace(first, top1=0.75)
    other_records.add(own)
    assert read_progress(other_grid, other_records, tmp_path) == 1
    assert other_records.get(first.cell) == own


@pytest.mark.parametrize("line", ['{"record": {"cell": 1', "[]", "3", '{"record": {}}', '{"launch": {"place": 1}}'])
def test_a_damaged_file_is_refused(tmp_path: Path, line: str) -> None:
    grid, records = open_study(tmp_path / "here")
    finish(grid, records, 1)
    write_progress(grid, records, tmp_path)
    path = progress_path(tmp_path, "s")
    path.write_text(path.read_text() + line + "\n")
    with refused("line 2 ", field=path):
        read_progress(*open_study(tmp_path / "there"), tmp_path)
    assert not (tmp_path / "there").exists(), "nothing of a damaged file is taken"
