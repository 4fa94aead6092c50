"""Schedules by their defining points."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from podscale import schedules
from podscale.config import TrainSection


def train(**schedule: object) -> TrainSection:
    return TrainSection.model_validate(
        {"epochs": 90, "global_batch": 256, "schedule": {"learning_rate": 0.4, **schedule}}
    )


def test_total_steps_sees_every_image_of_the_last_epoch() -> None:
    assert schedules.total_steps(train(), 1_281_167) == math.ceil(90 * 1_281_167 / 256)
    assert schedules.total_steps(TrainSection(epochs=1, global_batch=10), 100) == 10
    assert schedules.total_steps(TrainSection(epochs=0.1, global_batch=10), 100) == 1
    assert schedules.total_steps(TrainSection(epochs=3, global_batch=7), 49) == 21


def test_warm_up_is_linear_from_its_start_to_the_peak() -> None:
    rates = [schedules.learning_rate(train(warmup_epochs=5, warmup_start=0.1), s, 10.0) for s in range(51)]
    assert rates[0] == 0.1
    assert rates[50] == pytest.approx(0.4)
    assert np.allclose(np.diff(rates[:51]), (0.4 - 0.1) / 50)


def test_step_schedule_is_goyals() -> None:
    document = train(name="step", warmup_epochs=5)
    at = {epoch: schedules.learning_rate(document, epoch * 100, 100.0) for epoch in (10, 29, 30, 59, 60, 80, 89)}
    assert at == pytest.approx({10: 0.4, 29: 0.4, 30: 0.04, 59: 0.04, 60: 0.004, 80: 0.0004, 89: 0.0004})


def test_cosine_halves_at_half_way_and_ends_at_the_end() -> None:
    document = train(name="cosine", warmup_epochs=10, end_learning_rate=0.02)
    assert schedules.learning_rate(document, 100, 10.0) == pytest.approx(0.4)
    assert schedules.learning_rate(document, 500, 10.0) == pytest.approx(0.21)
    assert schedules.learning_rate(document, 900, 10.0) == pytest.approx(0.02)


def test_polynomial_is_mlperfs() -> None:
    document = train(name="polynomial", power=2.0, warmup_epochs=18, learning_rate=29.0, end_learning_rate=1e-4)
    half = 18 + (90 - 18) / 2
    assert schedules.learning_rate(document, round(half * 40), 40.0) == pytest.approx(1e-4 + (29 - 1e-4) * 0.25)


def test_table_holds_every_step() -> None:
    document = train(warmup_epochs=3)
    table = schedules.table(document, 2560)
    assert table.dtype == np.float32
    assert table.shape == (900, len(schedules.COLUMNS))
    assert table[450, 0] == np.float32(schedules.learning_rate(document, 450, 10.0))


@given(st.floats(0.3, 50), st.integers(1, 2000))
def test_periods_are_crossed_as_often_as_they_fit(period: float, steps: int) -> None:
    crossed = sum(schedules.crosses(step, period) for step in range(1, steps + 1))
    assert crossed == (math.floor(steps / period + 1e-9) if period >= 1 else steps - _skipped(period, steps))
    assert not schedules.crosses(steps, 0)


def _skipped(period: float, steps: int) -> int:
    """Below one step per period every step completes at least one."""
    return sum(math.floor(s / period + 1e-9) == math.floor((s - 1) / period + 1e-9) for s in range(1, steps + 1))
