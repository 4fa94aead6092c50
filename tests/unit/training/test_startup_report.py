"""The parts of a launch's start, as metric and event."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from podscale.distributed import startup_clock
from podscale.distributed.startup_clock import StartupClock
from podscale.runs.job_start import JobStart
from podscale.telemetry.catalogue import STARTUP_PARTS
from podscale.telemetry.events import EventLog, read_records
from podscale.telemetry.goodput import GoodputTracker, after_join
from podscale.telemetry.metrics import TrainMetrics
from podscale.telemetry.step_log import format_record
from podscale.training.startup_report import StartupReport
from podscale.training.step_timer import StepTimer
from podscale.training.training_logger import TrainingLogger

Reader = Callable[[float], JobStart | None]
SUBMITTED = JobStart(1000.0, 1003.0, 1015.0, 1020.0, pods=2)


class Launch:
    """A launch on a fake clock, up to and including its first steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: Path, job_start: JobStart | Reader | None) -> None:
        self.now = 100.0
        monkeypatch.setattr(startup_clock, "time", self)
        clock = StartupClock(started_at=90.0, seconds={"supervisor": 2.0, "imports": 5.0, "rendezvous": 3.0})
        tracker = GoodputTracker(after_join(None, 1.0, 10.0, 0), clock=self.monotonic, wall_clock=self.monotonic)
        self.report = StartupReport(clock, tracker, job_start if callable(job_start) else lambda age: job_start)
        metrics = TrainMetrics(CollectorRegistry(), rank=0, run="r")
        metrics.values.add_source(self.report)
        self.values = metrics.values
        timer = StepTimer(metrics, log_every=1, goodput_tracker=tracker)
        self.logger = TrainingLogger(timer, EventLog(path), startup=self.report)

    def monotonic(self) -> float:
        return self.now

    def train(self, *, evaluation: float = 0.0) -> None:
        logger, phase = self.logger, self.logger.timer.phase
        self.now += 1.0  # build
        logger.restore_started()
        self.now += 0.5  # restore
        logger.started(resumed=False, step=0, total_steps=2, ranks=2, global_batch=8)
        with phase("evaluation"):
            self.now += evaluation
        for step in (1, 2):
            with phase("data_wait"):
                self.now += 4.0
            with phase("forward_backward"):
                self.now += 20.0
            logger.step_done(step, 4, 0)


def test_parts_that_arrive_after_the_first_step_are_metrics_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    arrived: list[JobStart] = []
    launch = Launch(monkeypatch, tmp_path / "metrics.jsonl", lambda age: arrived[0] if arrived else None)
    launch.train()
    assert "pull" not in launch.report.seconds
    list(launch.values.collect())
    assert "pull" not in launch.report.seconds
    arrived.append(SUBMITTED)
    list(launch.values.collect())
    assert launch.values.get("train_startup_seconds", "pull") == 12.0
    assert [*launch.report.seconds] == [*STARTUP_PARTS]


def test_the_parts_from_submission_to_the_first_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    launch = Launch(monkeypatch, tmp_path / "metrics.jsonl", SUBMITTED)
    launch.train(evaluation=7.0)
    expected = {"scheduling": 3.0, "pull": 12.0, "supervisor": 2.0, "imports": 5.0, "rendezvous": 3.0}
    expected |= {"build": 1.0, "restore": 7.5, "first_batch": 4.0, "compile": 20.0}
    assert launch.report.seconds == pytest.approx(expected)
    assert [*launch.report.seconds] == [*STARTUP_PARTS]
    (record,) = [one for one in read_records(tmp_path / "metrics.jsonl") if one.get("event") == "startup"]
    assert record["parts"] == pytest.approx(expected)
    assert record["seconds"] == pytest.approx(sum(expected.values()))
    assert "57.5 s" in format_record(record)
    list(launch.values.collect())
    assert launch.values.get("train_startup_seconds", "pull") == 12.0
    assert launch.values.get("train_startup_seconds", "compile") == 20.0


def test_without_a_launcher_the_parts_begin_with_the_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    launch = Launch(monkeypatch, tmp_path / "metrics.jsonl", None)
    launch.train()
    assert {"scheduling", "pull"}.isdisjoint(launch.report.seconds)
    assert sum(launch.report.seconds.values()) == pytest.approx(10.0 + 1.0 + 0.5 + 4.0 + 20.0), "the age of the launch"
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert sum(json.loads(line).get("event") == "startup" for line in lines) == 1, "once, after the first step"
