"""Attempts of a pipeline's launcher: failures count within one run of the pipeline, and never between two."""

from pathlib import Path

import pytest

from podscale.runs import RunDirectory
from podscale.stages.pipeline_launcher import begin_attempt, read_launcher_record, write_launcher_record


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "runs" / "r")


def test_failures_count_in_the_next_attempt_of_the_same_pipeline_run(run: RunDirectory) -> None:
    record = begin_attempt(run, "train", "workflow-1").with_failure(77, "lost")
    write_launcher_record(run, "train", record)
    again = begin_attempt(run, "train", "workflow-1")
    assert (again.job_failures, again.exit_code, again.error, again.state) == (1, 77, "lost", "running")
    assert begin_attempt(run, "evaluate", "workflow-1").job_failures == 0
    assert begin_attempt(run, "train", "workflow-2").job_failures == 0


def test_without_an_identity_no_failure_counts(run: RunDirectory) -> None:
    write_launcher_record(run, "train", begin_attempt(run, "train", "").with_failure(1, "x"))
    assert begin_attempt(run, "train", "").job_failures == 0


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"train": []}', '{"train": {"unknown": 1}}'])
def test_a_damaged_record_counts_as_none(run: RunDirectory, content: str) -> None:
    run.create()
    run.launcher.write_text(content)
    assert read_launcher_record(run, "train") is None
    assert begin_attempt(run, "train", "workflow-1").job_failures == 0


def test_a_volume_that_cannot_be_written_stops_no_launcher(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    run = RunDirectory(tmp_path / "file" / "r")
    assert begin_attempt(run, "train", "workflow-1").job_failures == 0
