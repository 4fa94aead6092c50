"""The start of a job's pods, in the run directory."""

import time
from pathlib import Path

import pytest

from podscale.runs import RunDirectory
from podscale.runs.job_start import JobStart, read_job_start, write_job_start


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "runs" / "r1")


def started(seconds_ago: float) -> JobStart:
    at = time.time() - seconds_ago
    return JobStart(at - 15.0, at - 12.0, at, at + 5.0, pods=2)


def test_a_rank_reads_the_start_of_its_own_launch(run: RunDirectory) -> None:
    start = started(60.0)
    write_job_start(run, start)
    assert read_job_start(run, 59.0) == start
    assert (start.scheduling, start.pull) == pytest.approx((3.0, 12.0))


def test_a_restarted_launch_does_not_read_the_start_of_an_earlier_one(run: RunDirectory) -> None:
    write_job_start(run, started(60.0))
    assert read_job_start(run, 20.0) is None


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"submitted_at": 1}', "\0"])
def test_a_file_that_cannot_be_read_is_no_start(run: RunDirectory, text: str) -> None:
    assert read_job_start(run, 0.0) is None
    run.create()
    run.job_start.write_text(text)
    assert read_job_start(run, 0.0) is None


def test_the_annotation_of_the_pod_counts_before_the_run_directory(run: RunDirectory, tmp_path: Path) -> None:
    file = tmp_path / "job-start"
    environ = {"PODSCALE_JOB_START": str(file)}
    assert read_job_start(run, 59.0, environ) is None
    file.write_text("")  # the pod has no annotation yet
    write_job_start(run, started(59.0))
    assert read_job_start(run, 59.0, environ) is not None
    file.write_text((start := started(60.0)).to_text())
    assert read_job_start(run, 59.0, environ) == start
    assert read_job_start(run, 20.0, environ) is None, "the file is that of an earlier start of the container"


def test_a_file_is_read_again_only_if_it_changed(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each scrape of the metrics of a restarted launch asks for it."""
    reads: list[Path] = []
    read_text = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path, **options: reads.append(path) or read_text(path, **options))
    write_job_start(run, started(60.0))
    assert [read_job_start(run, 20.0) for _ in range(3)] == [None] * 3
    assert reads == [run.job_start]
    write_job_start(run, started(20.0))
    assert read_job_start(run, 20.0) is not None
    assert len(reads) == 2


def test_times_of_different_clocks_are_never_negative() -> None:
    start = JobStart(100.0, 99.0, 98.0, 98.0)
    assert (start.scheduling, start.pull) == (0.0, 0.0)
    assert min(start.to_json().values()) == 0.0


def test_a_volume_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    write_job_start(RunDirectory(tmp_path / "runs" / "r1"), started(1.0))
