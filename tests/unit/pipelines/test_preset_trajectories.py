"""The published presets keep their constants and their forms: golden trajectories (see `preset_trajectories`)."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from podscale.pipelines.presets import published_presets
from tests.support.preset_trajectories import (
    Trajectory,
    golden,
    schedule_rows,
    tiny,
    torch_world,
    train_in_torch,
)

ROWS, LOSSES = 2e-6, 5e-5
"""Relative tolerances: rounding of the golden rows, and of kernels over 20 steps (3e-6 between AVX2 and AVX-512)."""

MUTATIONS = [
    # one constant or form of one preset at a time, and whether the schedule's rows or the losses show it
    ("ying2018-32k", "train.optimizer.momentum_form=unscaled", "losses"),
    ("ying2018-32k", "train.optimizer.trust=sum_of_norms", "losses"),
    ("ying2018-32k", "train.optimizer.trust=norm_of_sum", "losses"),
    ("ying2018-32k", "train.optimizer.decay_biases=false", "losses"),
    ("ying2018-32k", "train.optimizer.decay_all=true", "losses"),
    ("ying2018-32k", "train.optimizer.adapt_all=true", "losses"),
    ("ying2018-32k", "train.optimizer.trust_coefficient=0.002", "losses"),
    ("ying2018-32k", "train.optimizer.eps=1e-5", "losses"),
    ("ying2018-32k", "train.optimizer.nesterov=true", "losses"),
    ("ying2018-32k", "train.label_smoothing=0", "losses"),
    ("ying2018-32k", "model.zero_init_last_gamma=false", "losses"),
    ("ying2018-32k", "model.batch_norm.eps=1e-3", "losses"),
    ("ying2018-32k", "train.schedule.warmup_epochs=34", "schedule"),
    ("ying2018-64k", "train.schedule.learning_rate=34", "schedule"),
    ("ying2018-32k", "train.optimizer.weight_decay=2e-4", "schedule"),
    ("ying2018-32k", "train.schedule.end_learning_rate=0", "schedule"),
    ("kumar2019-32k", "train.optimizer.eps=0", "losses"),
    ("kumar2019-32k-unscaled", "train.optimizer.momentum_form=scaled", "losses"),
    ("kumar2019-32k-tuned", "train.optimizer.momentum=0.9", "schedule"),
    ("jia2018-64k", "train.label_smoothing=0.1", "losses"),
    ("codreanu2017-64nodes", "train.optimizer.decay_biases=false", "losses"),
    ("codreanu2017-64nodes", "train.schedule.momentum_correction=false", "schedule"),
    ("codreanu2017-64nodes", "model.batch_norm.momentum=0.1", "variance"),
    ("adya2018-cifar100-16k", "train.optimizer.nlcg.variant=displacement", "losses"),
    ("adya2018-cifar100-16k", "train.optimizer.nlcg.beta=polak_ribiere", "losses"),
    ("adya2018-cifar100-16k", "train.optimizer.decay_biases=false", "losses"),
    ("adya2018-cifar100-16k", "train.optimizer.weight_decay=1e-4", "schedule"),
    ("adya2018-cifar100-16k", "model.batch_norm.momentum=0.1", "variance"),
    ("krishnan2018-32k", "train.optimizer.neumann.gamma=0.9", "losses"),
    ("krishnan2018-32k", "train.optimizer.neumann.momentum_end=0.99", "losses"),
    ("krishnan2018-32k", "train.optimizer.neumann.beta=0", "losses"),
    ("krishnan2018-32k", "train.optimizer.neumann.alpha=1e-5", "losses"),
    ("shampoo-mlperf-32k", "train.optimizer.shampoo.beta2=0.99", "losses"),
    ("rsb-a2", "train.binary_threshold=null", "losses"),
]


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
