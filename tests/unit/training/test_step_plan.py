"""Step plan of a run: the number of steps, and those that an evaluation or a checkpoint follows. Needs no engine."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from podscale.config import RunConfig
from podscale.training.step_plan import StepPlan, completes_period


def plan(images: int = 48, **sections: dict[str, Any]) -> StepPlan:
    """Return a plan of 12 steps: four epochs of 48 images with batches of 16, unless the sections say otherwise."""
    train = {"epochs": 4, "global_batch": 16, **sections.pop("train", {})}
    return StepPlan(RunConfig.model_validate({"train": train, **sections}), images)


def due(rule: Any, steps: int) -> list[int]:
    return [step for step in range(1, steps + 1) if rule(step)]


def test_an_epoch_need_not_be_a_whole_number_of_steps() -> None:
    odd = plan(images=40)
    assert (odd.positions.epoch_length, odd.steps) == (2.5, 10)
    assert due(odd.evaluates_after, 10) == [3, 5, 8, 10]


def test_every_step_has_a_learning_rate() -> None:
    schedule = {"name": "constant", "learning_rate": 0.4, "warmup_epochs": 1, "warmup_start": 0.1}
    rates = plan(train={"schedule": schedule}).learning_rates
    np.testing.assert_allclose(rates, [0.1, 0.2, 0.3, *[0.4] * 9])


@pytest.mark.parametrize(
    ("every_epochs", "steps"), [(1, [3, 6, 9, 12]), (2, [6, 12]), (5, [12]), (0, [12]), (1 / 3, list(range(1, 13)))]
)
def test_evaluations_follow_epochs_and_the_last_step(every_epochs: float, steps: list[int]) -> None:
    assert due(plan(evaluate={"every_epochs": every_epochs}).evaluates_after, 12) == steps


@pytest.mark.parametrize(
    ("every_epochs", "offset", "epochs", "after"),
    [
        (4, 1, 35, [1, 5, 9, 13, 17, 21, 25, 29, 33, 35]),
        (4, 3, 11, [3, 7, 11]),
        (4, 0, 9, [4, 8, 9]),
        (2, 5, 9, [5, 7, 9]),  # no evaluation before the offset, however long it is
        (4, 9, 9, [9]),
    ],
)
def test_evaluations_begin_at_the_offset(every_epochs: float, offset: float, epochs: int, after: list[int]) -> None:
    sections = {"train": {"epochs": epochs}, "evaluate": {"every_epochs": every_epochs, "offset": offset}}
    assert due(plan(**sections).evaluates_after, 3 * epochs) == [3 * epoch for epoch in after]
    odd = plan(images=40, **sections)  # 2.5 steps an epoch: the step that completes the epoch
    assert due(odd.evaluates_after, odd.steps) == [math.ceil(2.5 * epoch) for epoch in after]


def test_an_offset_between_two_steps_is_reached_by_the_next() -> None:
    assert due(plan(evaluate={"every_epochs": 2, "offset": 0.5}).evaluates_after, 12) == [2, 8, 12]


@pytest.mark.parametrize(
    ("checkpoint", "steps"),
    [
        ({"every_steps": 0, "every_epochs": 0}, [12]),
        ({"every_steps": 5, "every_epochs": 0}, [5, 10, 12]),
        ({"every_steps": 0, "every_epochs": 2}, [6, 12]),
        ({"every_steps": 5, "every_epochs": 2}, [5, 6, 10, 12]),
        ({"every_steps": 8, "every_epochs": 1}, [3, 6, 8, 9, 12]),
        ({"every_steps": 0, "every_epochs": 0, "snapshots": [0.5, 3]}, [2, 9, 12]),
    ],
)
def test_saves_follow_steps_epochs_snapshots_and_the_last_step(checkpoint: dict[str, Any], steps: list[int]) -> None:
    assert due(plan(checkpoint=checkpoint).saves_after, 12) == steps


def test_a_snapshot_follows_the_step_that_completes_its_epoch() -> None:
    assert plan(images=40, checkpoint={"snapshots": [1, 2, 3.1]}).snapshot_steps == {3, 5, 8}
    assert plan().snapshot_steps == frozenset()


def test_an_evaluation_or_a_save_makes_a_step_due() -> None:
    both = plan(evaluate={"every_epochs": 2}, checkpoint={"every_steps": 5, "every_epochs": 0})
    assert due(both.is_due_after, 12) == [5, 6, 10, 12]


@given(st.floats(0.3, 50), st.integers(1, 2000))
def test_periods_are_completed_as_often_as_they_fit(period: float, steps: int) -> None:
    crossed = sum(completes_period(step - 1, step, period) for step in range(1, steps + 1))
    assert crossed == (math.floor(steps / period + 1e-9) if period >= 1 else steps - _skipped(period, steps))
    assert not completes_period(steps - 1, steps, 0)


def _skipped(period: float, steps: int) -> int:
    """Return the number of steps that complete no period, for periods below one step."""
    return sum(math.floor(s / period + 1e-9) == math.floor((s - 1) / period + 1e-9) for s in range(1, steps + 1))


def test_epochs_are_found_when_the_batch_changes() -> None:
    """48 images: 3 steps of 16, then 3 of 32 for two epochs, then 6 of 8 for the last."""
    phases = [{"start": 1, "global_batch": 32}, {"start": 3, "global_batch": 8, "accumulation": 2}]
    checkpoint = {"every_epochs": 2, "snapshots": [1, 2.5]}
    growing = plan(train={"phases": phases}, evaluate={"every_epochs": 1}, checkpoint=checkpoint)
    assert growing.steps == 3 + 3 + 6
    assert due(growing.evaluates_after, 12) == [3, 5, 6, 12]  # epoch 2 ends inside of step 5
    assert due(growing.saves_after, 12) == [3, 5, 6, 12]
    assert growing.snapshot_steps == {3, 6}
    assert [growing.epoch_after(step) for step in (0, 3, 4, 6, 9, 12)] == pytest.approx([0, 1, 5 / 3, 3, 3.5, 4])
    assert [growing.images_left_after(step) for step in (0, 3, 6, 11, 12)] == [192, 144, 48, 8, 0]
    batches = [growing.batch_phase_after(step) for step in range(13)]
    assert [phase.global_batch for phase in batches] == [16] * 3 + [32] * 3 + [8] * 7
    assert [phase.accumulation for phase in batches] == [1] * 6 + [2] * 7
    assert [growing.end_of_batch(step) for step in (0, 2, 3, 6, 11)] == [3, 3, 6, 12, 12]


def test_a_change_of_accumulation_alone_keeps_the_steps() -> None:
    split = plan(train={"phases": [{"start": 2, "accumulation": 4}]})
    assert split.steps == 12
    assert (split.end_of_batch(0), split.batch_phase_after(6).accumulation) == (6, 4)
