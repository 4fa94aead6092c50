"""Results of a run that is read again from its directory."""

import shutil
from pathlib import Path

import pytest

import podscale
from podscale.errors import ABSENT
from tests.support.digits_run import DigitsRun
from tests.support.refusals import refused


@pytest.fixture
def run(digits_run: DigitsRun, tmp_path: Path) -> podscale.Run:
    shutil.copytree(digits_run.path, tmp_path / "runs" / "copy")
    return podscale.Run.open(tmp_path / "runs" / "copy")


def test_a_run_is_opened_where_it_is(run: podscale.Run, tmp_path: Path) -> None:
    assert (run.id, run.directory) == ("copy", tmp_path / "runs" / "copy")
    assert run.model == run.directory / "model"
    assert run.outcomes["train"].is_done


def test_scores_and_metrics_are_those_of_the_files(run: podscale.Run) -> None:
    steps, evaluations = run.metrics("step"), run.metrics("evaluation")
    assert [record["step"] for record in steps] == sorted({record["step"] for record in steps})
    assert run.evaluation.scores.top1 == pytest.approx(evaluations[-1]["top1"])
    assert len(run.metrics()) == len(steps) + len(evaluations) + len(run.metrics("event"))


def test_what_is_missing_says_what_to_call(run: podscale.Run) -> None:
    with refused("podscale.write_report", field=str(run.directory / "report.html")):
        _ = run.report
    (run.directory / "evaluation.json").unlink()
    with refused("podscale.evaluate"):
        _ = run.evaluation


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with refused(field=str(tmp_path), got=ABSENT):
        podscale.Run.open(tmp_path)
