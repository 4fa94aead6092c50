"""Global batches that change by phase, on real processes: exact sample order, bit-exact resume, other world sizes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from podscale.data.shard_set import ShardSet
from podscale.pytorch.batch_norm import BatchNorm
from podscale.pytorch.trainer import PyTorchTrainer
from podscale.pytorch.world import World
from tests.distributed.training.test_training import (
    Prepare,
    assert_same_bits,
    before_every_step,
    document,
    final_state,
    losses_of,
    records_of,
    run_training,
    stop_after,
    train_recorded,
)

IMAGES = 48
PHASES = (
    {"start": 1, "global_batch": 32},
    {"start": 2.4, "global_batch": 16, "accumulation": 2, "schedule": {"learning_rate": 0.02}},
)
SIZES = [8] * 6 + [32] * 3 + [16] * 3
"""Batch of each step: epoch 2.4 ends inside of the ninth, from sample 112 to 144."""
CHANGING = {"train__global_batch": 8, "train__phases": PHASES, "model__batch_norm": {"span": 8}}
"""On two ranks batch norm's groups are both ranks, then two parts of a rank's batch, then both ranks again."""


def train_for_keys(config: Any, shards: Path, world: World, stop: Prepare | None = None) -> dict[int, list[int]]:
    """Train until the end, or until `stop` stops it, and return the sample keys of each step of this rank."""
    stopped, keys = train_recorded(config, shards, world, stop or (lambda session: None))
    assert bool(stopped) == (stop is not None), stopped
    return keys


def global_order(by_rank: list[dict[int, list[int]]], step: int) -> list[int]:
    """Return the keys of a global batch in the sample order: rank r has every n-th one, from r on."""
    return np.array([keys[step] for keys in by_rank]).T.reshape(-1).tolist()  # type: ignore[no-any-return]


def test_runs_stopped_around_a_change_have_the_bits_and_the_order_of_one(
    run_world: Any, make_shard_set: Any, tmp_path: Path
) -> None:
    """Stopped two steps before the change after step 6, at it, and two steps after it."""
    shards = make_shard_set()
    straight = document(tmp_path, run__id="straight", **CHANGING)
    whole = run_world(2, lambda world: train_for_keys(straight, shards, world))
    assert [len(global_order(whole, number)) for number in range(12)] == SIZES
    stream = [key for number in range(12) for key in global_order(whole, number)]
    everything = sorted(ShardSet.open(shards).split("train").keys.tolist())
    assert len(everything) == IMAGES
    for epoch in range(4):
        assert sorted(stream[IMAGES * epoch : IMAGES * (epoch + 1)]) == everything, "each sample once an epoch"

    for asked, saved in ((1, 4), (3, 6), (6, 8)):
        halted = document(tmp_path, run__id=f"halted{saved}", **CHANGING)
        first = run_world(2, lambda world, c=halted, n=asked: train_for_keys(c, shards, world, stop_after(n, 1)))
        assert sorted(first[0]) == list(range(saved))
        second = run_world(2, lambda world, c=halted: train_for_keys(c, shards, world))
        assert [{**first[rank], **second[rank]} for rank in range(2)] == whole
        assert_same_bits(final_state(halted), final_state(straight))
        assert losses_of(halted) == losses_of(straight)


def test_epochs_events_and_groups_follow_the_batches(run_world: Any, make_shard_set: Any, tmp_path: Path) -> None:
    shards = make_shard_set()
    config = document(tmp_path, **CHANGING)
    seen: list[tuple[int | None, int | None, int]] = []

    def body(world: World) -> list[tuple[int | None, int | None, int]]:
        def look(session: PyTorchTrainer) -> None:
            step: Any = session.step
            norm = next(module for module in session.state.model.modules() if isinstance(module, BatchNorm))

            def record(batch: Any) -> None:
                ranks = norm.group.size() if norm.group is not None else None
                seen.append((ranks, norm.part_size, step.forward_backward.accumulation))

            before_every_step(session, record)

        run_training(config, shards, world, look)
        return seen

    groups = run_world(2, body)
    assert groups[0] == groups[1] == [(2, None, 1)] * 6 + [(None, 8, 1)] * 3 + [(2, None, 2)] * 3
    lines = records_of(config)
    ends = np.cumsum(SIZES) / IMAGES
    steps = [line for line in lines if line["kind"] == "step"]
    np.testing.assert_allclose([line["epoch"] for line in steps], ends, atol=1e-4)
    rates = [line["learning_rate"] for line in steps]
    assert max(rates[:9]) == pytest.approx(0.05), "the warm-up of an epoch ends with the six steps of 8"
    assert rates.index(max(rates)) == 6
    assert rates[9] == pytest.approx(0.02), "the last schedule begins with its phase"
    evaluations = [line["step"] for line in lines if line["kind"] == "evaluation"]
    assert evaluations == [6, 8, 9, 12], "epochs 1, 2, 3 and 4 are complete"
    start = next(line for line in lines if line.get("event") == "start")
    assert (start["global_batch"], start["total_steps"], start["total_epochs"]) == (8, 12, 4)
    changes = [line for line in lines if line.get("event") == "batch"]
    assert [(line["step"], line["global_batch"], line["accumulation"]) for line in changes] == [(6, 32, 1), (9, 16, 2)]


def test_other_world_sizes_and_all_reduces_keep_the_batches(
    run_world: Any, make_shard_set: Any, tmp_path: Path
) -> None:
    """Four ranks with a sharded torus update, continued on two with a flat one; and DDP."""
    shards = make_shard_set()
    torus = {"train__all_reduce": {"algorithm": "torus2d", "row": 2}, "train__weight_update": "sharded"}
    plain, elastic, ddp = (
        document(tmp_path, run__id=name, **CHANGING, **more)
        for name, more in (("plain", {}), ("elastic", torus), ("ddp", {"train__all_reduce": {"algorithm": "ddp"}}))
    )
    flat = elastic.model_copy(update={"train": plain.train})
    whole = run_world(2, lambda world: train_for_keys(plain, shards, world))
    four = run_world(4, lambda world: train_for_keys(elastic, shards, world, stop_after(6, 2)))
    two = run_world(2, lambda world: train_for_keys(flat, shards, world))
    run_world(2, lambda world: run_training(ddp, shards, world))
    assert (sorted(four[0]), sorted(two[0])) == (list(range(8)), list(range(8, 12)))
    for number in range(12):
        assert global_order(four if number < 8 else two, number) == global_order(whole, number)
    expected = losses_of(plain)
    for config in (elastic, ddp):
        losses = losses_of(config)
        assert list(losses) == list(expected)
        np.testing.assert_allclose(list(losses.values()), list(expected.values()), rtol=2e-3)
