"""Dropout of AlexNet on real processes is keyed by (seed, step, rank), so a resumed run repeats it to the bit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from podscale import models
from podscale.config import RunConfig
from podscale.errors import Preempted
from podscale.pytorch.models import build_model
from podscale.pytorch.train_step import DropoutRng
from podscale.pytorch.trainer import PyTorchTrainer, build_trainer
from podscale.pytorch.world import World
from podscale.runs import RunDirectory
from podscale.runs.checkpoint.format import complete_entries, read_snapshot
from podscale.runs.model_files import WEIGHTS_FILE
from tests.support.engines import train_session


def document(workspace: Path) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"id": "alex", "workspace": str(workspace), "seed": 3},
            "input": {"loader": "reference", "image_size": 64},
            "model": {"name": "alexnet", "width": 4},
            "train": {"epochs": 2, "global_batch": 16, "optimizer": {"name": "lars"}, "schedule": {"learning_rate": 1}},
            "evaluate": {"batch": 4},
            "checkpoint": {"keep_last": 2, "keep_best": 1, "asynchronous": False},
            "launch": {"timeout_seconds": 60},
        }
    )


def training(config: RunConfig, shards: Path, world: World, stop: int | None = None) -> dict[str, float]:
    """Run one launch, with a stop request during step `stop`."""

    def prepare(session: PyTorchTrainer) -> None:
        feed = session.prefetcher

        def watched(batches: Any, phase: Any) -> Any:
            for batch in feed(batches, phase):
                session.stop_request.requested = batch.host_batch.step == stop
                yield batch

        session.prefetcher = watched  # type: ignore[assignment]

    return train_session(build_trainer, config, world, shards, prepare).evaluation


def test_a_resumed_alexnet_repeats_its_dropout_to_the_bit(run_world: Any, make_shard_set: Any, tmp_path: Path) -> None:
    shards = make_shard_set()
    straight, halted = document(tmp_path / "straight"), document(tmp_path / "halted")

    def stopped(world: World) -> None:
        with pytest.raises(Preempted):
            training(halted, shards, world, stop=1)

    (evaluation, _) = run_world(2, lambda world: training(straight, shards, world))
    run_world(2, stopped)
    assert run_world(2, lambda world: training(halted, shards, world))[0] == evaluation
    expected, resumed = (
        read_snapshot(complete_entries(RunDirectory.for_config(config).checkpoints)[0]).arrays
        for config in (straight, halted)
    )
    assert [name for name in expected if not np.array_equal(expected[name], resumed[name])] == []
    exported = load_file(RunDirectory.for_config(straight).model / WEIGHTS_FILE)
    spec = models.model_spec(straight.model, 4)
    assert {name: array.shape for name, array in exported.items()} == {
        part.name: part.shape for part in (*spec.parameters, *spec.buffers)
    }


def test_masks_depend_on_step_rank_and_seed_only() -> None:
    model = build_model(document(Path()).model, 3).train()

    def mask(seed: int, step: int, rank: int) -> list[bool]:
        torch.manual_seed(np.random.default_rng().integers(2**31))  # independent of earlier draws
        DropoutRng(model, seed, World(rank, 2, rank, 2, torch.device("cpu"))).start_step(step)
        return (torch.nn.functional.dropout(torch.ones(64)) > 0).tolist()

    assert mask(0, 5, 1) == mask(0, 5, 1)
    others = [mask(0, 5, 0), mask(0, 6, 1), mask(1, 5, 1)]
    assert mask(0, 5, 1) not in others
    assert len({tuple(other) for other in others}) == 3


def test_a_network_without_dropout_does_not_seed_the_generator() -> None:
    randomness = DropoutRng(torch.nn.Linear(2, 2), 0, World(0, 1, 0, 1, torch.device("cpu")))
    before = torch.get_rng_state()
    randomness.start_step(3)
    assert torch.equal(torch.get_rng_state(), before)
