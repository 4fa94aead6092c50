"""Fixtures: a world on one CUDA device, and trainings in this process."""

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from podscale.config import RunConfig

TrainHere = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def world() -> Iterator[Any]:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    from podscale.pytorch.world import join_world, leave_world

    yield join_world(60.0, {})
    leave_world()


@pytest.fixture
def document() -> Callable[..., RunConfig]:
    """Return `document(workspace, **train)`: a small network on 32 px images, 12 steps of 16 images."""

    def make(workspace: Path, *, model: dict[str, Any] | None = None, size: int = 32, **train: Any) -> RunConfig:
        return RunConfig.model_validate(
            {
                "run": {"id": "gpu", "workspace": str(workspace)},
                "input": {"loader": "reference", "image_size": size},
                "model": model or {"name": "resnet18", "stem": "small", "width": 16},
                "train": {
                    "epochs": 4,
                    "global_batch": 16,
                    "deterministic": True,
                    "schedule": {"learning_rate": 0.05, "warmup_epochs": 1},
                    **train,
                },
                "evaluate": {"batch": 8},
                "telemetry": {"log_every": 1},
            }
        )

    return make


@pytest.fixture
def train_here(world: Any) -> TrainHere:
    """Return `train_here(config, shards, watch)`, which trains and returns all tensors of the final state.

    `watch(trainer, step)`, if given, is called before each step.
    """
    return partial(_train_here, world)


def _train_here(
    world: Any, config: RunConfig, shards: Path, watch: Callable[[Any, int], None] = lambda trainer, step: None
) -> dict[str, Any]:
    from podscale.data.shard_set import ShardSet
    from podscale.distributed.step_status import StopRequest
    from podscale.distributed.worker_env import WorkerEnv
    from podscale.pytorch.trainer import build_trainer
    from podscale.runs import RunDirectory
    from podscale.training.training_logger import open_training_logger
    from podscale.training.worker_stages import open_checkpoint_store

    run, shard_set = RunDirectory.for_config(config).create(), ShardSet.open(shards)
    with open_training_logger(WorkerEnv(config, "train", str(shards), run.path), world) as monitor:
        checkpoints = open_checkpoint_store(config, run, shard_set, listener=monitor.checkpoint_reported)
        trainer = build_trainer(config, world, shard_set, checkpoints, monitor, StopRequest())
        feed = trainer.prefetcher

        def watched(batches: Any, phase: Any) -> Iterator[Any]:
            for batch in feed(batches, phase):
                watch(trainer, batch.host_batch.step)
                yield batch

        trainer.prefetcher = watched  # type: ignore[assignment]
        try:
            trainer.train()
        finally:
            trainer.close()
        return {name: tensor.clone().cpu() for name, tensor in trainer.state.tensors().items()}
