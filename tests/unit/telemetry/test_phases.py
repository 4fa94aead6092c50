"""Straggler detection: not for one slow step, not for a small difference, and with an end."""

from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from podscale.telemetry.phases import (
    CONSECUTIVE_INTERVALS,
    MIN_INTERVAL_STEPS,
    BusyTime,
    RankComparison,
    StragglerDetector,
    interval_steps,
)
from podscale.telemetry.registry import MetricRegistry

HOSTS = ("a", "b", "c")
SLOW = RankComparison(1, 40, 20)
EVEN = RankComparison(2, 21, 20)


@pytest.fixture
def events() -> list[tuple[str, dict[str, Any]]]:
    return []


@pytest.fixture
def stragglers(events: list[tuple[str, dict[str, Any]]]) -> StragglerDetector:
    return StragglerDetector(HOSTS, lambda event, **values: events.append((event, values)))


def test_a_straggler_is_reported_once_and_its_end_too(stragglers: StragglerDetector, events: Any) -> None:
    comparisons = [SLOW] * (CONSECUTIVE_INTERVALS + 4) + [EVEN] * (CONSECUTIVE_INTERVALS + 4)
    for number, comparison in enumerate(comparisons, start=1):
        stragglers.interval_done(10 * number, comparison)
    values = {"ratio": 2.0, "milliseconds": 40, "fastest_milliseconds": 20}
    assert events == [
        ("straggler", {"step": 10 * CONSECUTIVE_INTERVALS, "rank": 1, "host": "b", **values}),
        ("straggler_over", {"step": 10 * (2 * CONSECUTIVE_INTERVALS + 4), "rank": 1, "host": "b"}),
    ]


def test_a_straggler_that_returns_is_reported_again(stragglers: StragglerDetector, events: Any) -> None:
    for comparison in ([SLOW] * CONSECUTIVE_INTERVALS + [EVEN] * CONSECUTIVE_INTERVALS) * 2:
        stragglers.interval_done(0, comparison)
    assert [event for event, _ in events] == ["straggler", "straggler_over"] * 2


def test_another_rank_becomes_the_straggler(stragglers: StragglerDetector, events: Any) -> None:
    for comparison in [SLOW] * CONSECUTIVE_INTERVALS + [RankComparison(2, 60, 20)] * CONSECUTIVE_INTERVALS:
        stragglers.interval_done(0, comparison)
    assert [(event, values["rank"]) for event, values in events] == [
        ("straggler", 1), ("straggler_over", 1), ("straggler", 2)
    ]  # fmt: skip


@pytest.mark.parametrize(
    "comparisons",
    [
        [SLOW] * (CONSECUTIVE_INTERVALS - 1) + [EVEN] + [SLOW] * (CONSECUTIVE_INTERVALS - 1),
        [SLOW, RankComparison(2, 40, 20)] * CONSECUTIVE_INTERVALS,  # alternating ranks: noise
        [RankComparison(1, 24, 20)] * 9,  # below the threshold
        [RankComparison(1, 3, 1)] * 9,  # a large ratio of rounded milliseconds
    ],
    ids=["interrupted", "alternating", "small", "short"],
)
def test_noise_is_not_reported_as_a_straggler(
    stragglers: StragglerDetector, events: Any, comparisons: list[RankComparison]
) -> None:
    for comparison in comparisons:
        stragglers.interval_done(0, comparison)
    assert events == []


def test_the_mean_is_of_the_interval_and_the_total_of_the_launch() -> None:
    busy = BusyTime()
    busy.add(9.0)  # the first step, which compiles everything
    assert (busy.mean, busy.total) == (0.0, 9.0)
    for seconds in (0.2, 0.4):
        busy.add(seconds)
    assert busy.mean == pytest.approx(0.3)
    busy.next_interval()
    busy.add(0.5)
    assert (busy.mean, busy.total) == (0.5, pytest.approx(10.1))


def test_busy_time_is_the_longer_of_device_and_host() -> None:
    busy = BusyTime()
    busy.add(0.001)
    busy.set_device_seconds(0.25)
    busy.add(0.001)
    busy.add(0.75)  # here the data was late, so the host's time is the longer one
    assert busy.mean == 0.5


@pytest.mark.parametrize(("log_every", "steps"), [(1, 10), (3, 12), (10, 10), (11, 11), (100, 100)])
def test_an_interval_ends_at_a_line_of_the_step_log(log_every: int, steps: int) -> None:
    assert interval_steps(log_every) == steps
    assert steps >= MIN_INTERVAL_STEPS


def test_exported_series(stragglers: StragglerDetector) -> None:
    registry, busy = CollectorRegistry(), BusyTime()
    for source in (busy, stragglers):
        readings = MetricRegistry(run="r", rank="0")
        readings.add_source(source)
        registry.register(readings)
    busy.add(2.5)

    def sample(name: str) -> float | None:
        return registry.get_sample_value(f"podscale_train_{name}", {"run": "r", "rank": "0"})

    assert sample("busy_seconds_total") == 2.5
    assert sample("straggler_rank") is None
    stragglers.interval_done(10, SLOW)
    assert (sample("straggler_rank"), sample("straggler_ratio")) == (1.0, 2.0)
