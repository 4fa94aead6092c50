"""The published presets keep their constants and their forms: golden trajectories (see `preset_trajectories`)."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from podscale.pipelines.presets import published_presets
from tests.support.preset_mutations import MUTATIONS
from tests.support.preset_trajectories import (
    Trajectory,
    golden,
    schedule_rows,
    tiny,
    torch_world,
    train_in_torch,
)

ROWS, LOSSES = 2e-6, 2e-9
"""Relative tolerances: rounding of the golden rows and losses. Kernels of other machines differ by 1e-14."""


@pytest.fixture(scope="module")
def world() -> Iterator[Any]:
    with torch_world() as joined:
        yield joined


def test_every_published_preset_has_a_golden_trajectory() -> None:
    assert sorted(golden()) == sorted(published_presets())


@pytest.mark.parametrize("name", published_presets())
def test_a_preset_follows_its_golden_trajectory(name: str, world: Any) -> None:
    """If a change is meant, write the file anew: python -m tests.support.preset_trajectories."""
    assert not differences(train_in_torch(tiny(name), world), golden()[name])


@pytest.mark.parametrize(("name", "change", "shown_by"), MUTATIONS)
def test_a_changed_constant_or_form_is_noticed(name: str, change: str, shown_by: str, world: Any) -> None:
    """By a difference of at least ten tolerances."""
    mutated = tiny(name, [change])
    if shown_by == "schedule":
        want = np.array(golden()[name].schedule)
        assert not np.allclose(schedule_rows(mutated), want, rtol=10 * ROWS, atol=1e-9)
    else:
        assert shown_by in differences(train_in_torch(mutated, world), golden()[name], times=10.0)


def differences(found: Trajectory, want: Trajectory, times: float = 1.0) -> set[str]:
    """Return the parts of a trajectory that differ by more than so many tolerances."""
    tolerances = {"schedule": (ROWS, 1e-9), "losses": (LOSSES, 0.1 * LOSSES), "variance": (LOSSES, 0.0)}
    return {
        part
        for part, (relative, absolute) in tolerances.items()
        if not np.allclose(getattr(found, part), getattr(want, part), times * relative, times * absolute)
    }
