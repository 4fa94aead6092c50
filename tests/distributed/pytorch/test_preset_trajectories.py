"""The published presets keep their constants and their forms: golden trajectories (see `preset_trajectories`)."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from podscale.pipelines.presets import published_presets
from tests.support.preset_mutations import MUTATIONS
from tests.support.preset_trajectories import (
    ROWS,
    STEPS,
    differences,
    golden,
    is_noticed,
    schedule_rows,
    tiny,
    torch_world,
    train_in_torch,
)


@pytest.fixture(scope="module")
def world() -> Iterator[Any]:
    with torch_world() as joined:
        yield joined


def test_every_published_preset_has_a_golden_trajectory() -> None:
    assert sorted(golden()) == sorted(published_presets())


def test_every_published_preset_has_a_constant_whose_change_is_noticed() -> None:
    assert {name for name, _, _ in MUTATIONS} == {*published_presets()}


@pytest.mark.parametrize("name", published_presets())
def test_a_preset_follows_its_golden_trajectory(name: str, world: Any) -> None:
    """If a change is meant, write the file anew: python -m tests.support.preset_trajectories."""
    found = train_in_torch(tiny(name), world)
    assert len(found.losses) == STEPS
    assert not differences(found, golden()[name])


@pytest.mark.parametrize(("name", "change", "shown_by"), MUTATIONS)
def test_a_changed_constant_or_form_is_noticed(name: str, change: str, shown_by: str, world: Any) -> None:
    """By a difference of at least ten tolerances; the training ends when the losses have it."""
    mutated, want = tiny(name, [change]), golden()[name]
    if shown_by == "schedule":
        assert not np.allclose(schedule_rows(mutated), want.schedule, rtol=10 * ROWS, atol=1e-9)
    elif shown_by == "losses":
        assert is_noticed(train_in_torch(mutated, world, lambda losses: is_noticed(losses, want)).losses, want)
    else:
        assert shown_by in differences(train_in_torch(mutated, world), want, times=10.0)
