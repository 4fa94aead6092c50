"""Phases in the engine change the training, and a run resumed inside a phase has the same bits, with mixing too."""

from pathlib import Path
from typing import Any

import pytest

from podscale.errors import Preempted
from podscale.pytorch.world import World
from tests.distributed.training.test_training import (
    assert_same_bits,
    document,
    final_state,
    losses_of,
    run_training,
    stop_after,
)

COLLAPSE = {
    "start": 2.4,  # step 7.2 of 12, so the phase begins with step 8
    "schedule": {"name": "polynomial", "learning_rate": 0.02},
    "weight_decay": 0.01,
    "reset_momentum": True,
    "crop": {"short_side": 0.875, "flip": 0.0},
    "image_size": 24,
}
MIX = {"mixup": 0.2, "cutmix": 1.0}


def test_a_run_resumed_inside_a_phase_has_the_same_bits(run_world: Any, make_shard_set: Any, tmp_path: Path) -> None:
    shards = make_shard_set()
    uninterrupted = document(tmp_path, run__id="whole", train__phases=(COLLAPSE,), train__mix=MIX)
    run_world(2, lambda world: run_training(uninterrupted, shards, world))
    parts = document(tmp_path, run__id="parts", train__phases=(COLLAPSE,), train__mix=MIX)

    def stopped(world: World) -> None:
        with pytest.raises(Preempted):
            run_training(parts, shards, world, stop_after(9, 1))

    run_world(2, stopped)
    run_world(2, lambda world: run_training(parts, shards, world))
    assert_same_bits(final_state(parts), final_state(uninterrupted))
    assert losses_of(parts) == losses_of(uninterrupted)


CHANGES = {
    "decay": {"weight_decay": 0.1},
    "momentum": {"momentum": 0.5},
    "reset": {"reset_momentum": True},
    "crop": {"crop": COLLAPSE["crop"]},
    "size": {"image_size": 24},
}


def test_each_value_of_a_phase_changes_the_losses(run_world: Any, make_shard_set: Any, tmp_path: Path) -> None:
    """Losses equal those of a run without the phase until it begins, and differ afterwards."""
    shards = make_shard_set()
    plain = document(tmp_path, run__id="plain")
    phased = {
        name: document(tmp_path, run__id=name, train__phases=({"start": 2.0, **change},))
        for name, change in CHANGES.items()
    }

    def body(world: World) -> None:
        for config in (plain, *phased.values()):
            run_training(config, shards, world)

    run_world(1, body)
    before = losses_of(plain)
    for name, config in phased.items():
        first = 7 if name in ("crop", "size") else 8  # from 1; a changed step shows in the next loss
        after = losses_of(config)
        assert [before[step] == after[step] for step in range(1, 13)] == [step < first for step in range(1, 13)], name
