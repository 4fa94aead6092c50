"""Positions of the steps in the stream of samples, for batches that change: by a count of one step after the other."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podscale.config import TrainSection
from podscale.data.step_positions import StepPositions, step_positions


def section(epochs: float, *changes: tuple[float, int], first: int = 16) -> TrainSection:
    phases = [{"start": start, "global_batch": batch} for start, batch in changes]
    return TrainSection.model_validate({"epochs": epochs, "global_batch": first, "phases": phases})


def walk(train: TrainSection, samples: int) -> list[tuple[int, int]]:
    """Return (samples before it, batch) of every step: a step takes the batch of the newest phase that has begun."""
    starts = [(0.0, train.global_batch), *((phase.start, phase.global_batch) for phase in train.phases)]
    steps, seen = [], 0
    while seen < train.epochs * samples - 1e-6:
        batch = [batch for start, batch in starts if seen >= start * samples - 1e-6][-1]
        steps.append((seen, batch))
        seen += batch
    return steps


def test_a_phase_begins_with_the_first_step_beyond_its_epoch() -> None:
    positions = step_positions(section(4, (1, 32), (2.1, 8)), 100)
    assert [positions.batch_at(step) for step in range(13)] == [16] * 7 + [32] * 4 + [8] * 2
    assert [positions.images_before(step) for step in (0, 6, 7, 8, 11, 12)] == [0, 96, 112, 144, 240, 248]
    assert positions.first_step(1) == 7, "the step from 96 to 112 crosses epoch 1 with the batch of the phase before"
    assert positions.first_step(4) == 31
    assert positions.epoch_before(11) == pytest.approx(2.4)


changes = st.lists(st.tuples(st.floats(0.05, 6.0), st.integers(1, 90)), max_size=4, unique_by=lambda change: change[0])


@given(st.integers(90, 2000), st.integers(1, 90), changes, st.floats(0.1, 7.0))
@settings(deadline=None, max_examples=200)
def test_every_step_has_the_position_of_a_plain_count(
    samples: int, first: int, changed: list[tuple[float, int]], epochs: float
) -> None:
    train = section(epochs, *sorted(changed), first=first)
    positions, steps = step_positions(train, samples), walk(train, samples)
    numbers = range(0, len(steps), max(1, len(steps) // 50))
    assert [(positions.images_before(step), positions.batch_at(step)) for step in numbers] == [
        steps[step] for step in numbers
    ]
    assert positions.first_step(epochs) == len(steps)
    times = positions.time_of(np.arange(len(steps)))
    assert times.tolist() == [images / first for images, _ in steps]


def test_a_constant_batch_counts_in_steps_to_the_last_bit() -> None:
    positions = StepPositions.constant(1_281_167, 48)
    assert np.array_equal(positions.time_of(np.arange(-1, 3000)), np.arange(-1.0, 3000.0))
    assert positions.epoch_before(12_345) == 12_345 / (1_281_167 / 48)
    assert positions.epoch_length == 1_281_167 / 48


@pytest.mark.parametrize("other", [{"momentum": 0.5}, {"accumulation": 2}, {"global_batch": 16}])
def test_a_phase_of_the_same_batch_is_no_change(other: dict[str, Any]) -> None:
    train = TrainSection.model_validate({"epochs": 3, "global_batch": 16, "phases": [{"start": 1.3, **other}]})
    assert step_positions(train, 100) == StepPositions.constant(100, 16)
