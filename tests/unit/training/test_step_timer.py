"""Step timer: steps and phases of a rank reach its metrics, its heartbeat and its log lines."""

import time

import pytest
from prometheus_client import CollectorRegistry

from podscale.distributed.progress_tracker import ProgressTracker
from podscale.telemetry.metrics import TrainMetrics
from podscale.training.step_timer import StepTimer


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> TrainMetrics:
    return TrainMetrics(registry, rank=0, run="r")


def test_each_log_line_gets_the_interval_since_the_one_before_once(metrics: TrainMetrics) -> None:
    timer = StepTimer(metrics, log_every=2)
    timer.start(step=0, last_step=5)
    for step in range(1, 6):
        timer.step_done(step, images=8, steps=1)
    intervals = {step: timer.pop_interval(step) for step in range(1, 6)}
    assert {step: interval.steps for step, interval in intervals.items() if interval} == {2: 2, 4: 2, 5: 1}
    assert timer.pop_interval(2) is None


def test_steps_of_one_call_share_its_time(registry: CollectorRegistry, metrics: TrainMetrics) -> None:
    tracker = ProgressTracker()
    timer = StepTimer(metrics, log_every=4, progress_tracker=tracker)
    timer.start(step=8, last_step=20)
    with timer.phase("data_wait"):
        time.sleep(0.02)
    timer.step_done(12, images=8, steps=4)
    labels = {"run": "r", "rank": "0"}
    assert registry.get_sample_value("podscale_train_steps_total", labels) == 4
    assert registry.get_sample_value("podscale_train_images_total", labels) == 32
    assert registry.get_sample_value("podscale_train_step_duration_seconds_sum", labels) == pytest.approx(0.02, abs=0.1)
    assert (tracker.step, tracker.phase) == (12, "data_wait")
    interval = timer.pop_interval(12)
    assert interval is not None
    assert (interval.steps, interval.images) == (4, 32)


def test_a_rank_is_busy_until_it_waits(metrics: TrainMetrics) -> None:
    timer = StepTimer(metrics, log_every=10)
    for step in (1, 2):
        with timer.phase("data_wait"):
            pass
        time.sleep(0.01)
        with timer.phase("allreduce_wait"):
            time.sleep(0.2)
        timer.step_done(step, images=1, steps=1)
    assert 0.01 <= timer.busy_seconds < 0.2
    assert timer.busy_time.total < 0.4
