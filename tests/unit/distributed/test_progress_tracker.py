"""Hang limit: the time without a step that counts as a hang."""

import pytest
from prometheus_client import CollectorRegistry

from podscale.distributed.progress_tracker import MIN_STEPS, P99_MULTIPLE, WINDOW_STEPS, HangLimit, ProgressTracker
from podscale.telemetry.registry import MetricRegistry


@pytest.mark.parametrize(
    ("seconds", "limit"),
    [
        ([0.1] * (MIN_STEPS - 1), 300.0),  # too few step times
        ([0.1] * MIN_STEPS, 60.0),
        ([8.0] * MIN_STEPS, 8.0 * P99_MULTIPLE),
        ([40.0] * MIN_STEPS, 300.0),
        ([0.1] * 199 + [20.0], 60.0),  # one slow step of 200 does not raise the limit
        ([0.1] * 100 + [20.0] * 100, 20.0 * P99_MULTIPLE),
        ([20.0] * 100 + [0.1] * WINDOW_STEPS, 60.0),  # the slow steps are outside of the window
    ],
)
def test_the_limit_is_learned_from_recent_steps(seconds: list[float], limit: float) -> None:
    learned = HangLimit(60.0, 300.0)
    for value in seconds:
        learned.add(value)
    assert learned.seconds == pytest.approx(limit)


def test_the_limit_begins_again_when_the_batch_changes() -> None:
    tracker = ProgressTracker(HangLimit(1.0, 300.0))
    for step in range(1, MIN_STEPS + 3):
        tracker.step_done(step, 0.01)
    assert tracker.hang_limit is not None
    assert tracker.hang_limit.seconds == 1.0
    tracker.enter_phase("forward_backward")
    assert tracker.in_step
    tracker.batch_changed()
    assert tracker.hang_limit.seconds == 300.0
    assert not tracker.in_step, "the next step may compile"
    tracker.step_done(MIN_STEPS + 3, 90.0)
    tracker.enter_phase("forward_backward")
    assert tracker.in_step
    assert tracker.hang_limit.seconds == 300.0, "the step that compiles is not learned"


def test_the_maximum_also_bounds_the_minimum() -> None:
    learned = HangLimit(180.0, 5.0)
    for _ in range(MIN_STEPS):
        learned.add(0.1)
    assert learned.seconds == 5.0


def test_the_limit_is_exported() -> None:
    registry = CollectorRegistry()
    readings = MetricRegistry(run="r", rank="3")
    readings.add_source(HangLimit(60.0, 300.0))
    registry.register(readings)
    assert registry.get_sample_value("podscale_train_hang_limit_seconds", {"run": "r", "rank": "3"}) == 300.0
