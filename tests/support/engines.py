"""Training and evaluation in the test's process, with either engine, on a small shard set."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from podscale.config import RunConfig
from podscale.data.shard_set import ShardSet
from podscale.distributed.step_status import StopRequest
from podscale.distributed.worker_env import RankEnv, WorkerEnv
from podscale.runs import RunDirectory
from podscale.runs.checkpoint.format import complete_entries, read_snapshot
from podscale.telemetry.events import filter_replays, read_records
from podscale.training.trainer import Trainer, TrainResult
from podscale.training.training_logger import open_training_logger
from podscale.training.worker_stages import open_checkpoint_store

Prepare = Callable[[Any], None]


def small(workspace: Path, **changes: Any) -> RunConfig:
    """Return the document of a small network on 16 px images: 12 steps of 16 images, four epochs of 48 samples.

    Args:
        changes: option values by name, with __ for the dot.
    """
    values: dict[str, Any] = {
        "run": {"id": "tiny", "workspace": str(workspace), "seed": 3},
        "input": {"loader": "reference", "image_size": 16},
        "model": {"name": "resnet18", "stem": "small", "width": 4},
        "train": {
            "epochs": 4,
            "global_batch": 16,
            "optimizer": {"name": "sgd", "nesterov": True},
            "schedule": {"learning_rate": 0.05, "warmup_epochs": 1},
        },
        "evaluate": {"batch": 4},
        "checkpoint": {"asynchronous": True},
        "telemetry": {"log_every": 1},
        "launch": {"timeout_seconds": 60},
    }
    for key, value in changes.items():
        section = values
        *parents, last = key.split("__")
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
    return RunConfig.model_validate(values)


def document(workspace: Path, run: str = "tiny", **changes: Any) -> RunConfig:
    """Return `small` with global batch norm, so that results do not depend on ranks, and with all checkpoints kept."""
    return small(workspace, **{"run__id": run, "model__batch_norm__span": 16, "checkpoint__keep_last": 20, **changes})


def train_in_jax(config: RunConfig, shards: Path, devices: int, prepare: Prepare = lambda s: None) -> TrainResult:
    """Train as the stage of the JAX engine does, in a world of one process with this many devices."""
    from podscale.jax.trainer import build_trainer

    as_jax = config.model_copy(update={"train": config.train.model_copy(update={"engine": "jax"})})
    return train_session(build_trainer, as_jax, jax_world(devices), shards, prepare)


def train_in_torch(config: RunConfig, shards: Path, prepare: Prepare = lambda s: None) -> TrainResult:
    """Train as a worker of the PyTorch engine does, in a world of one rank."""
    from podscale.pytorch.trainer import build_trainer
    from podscale.pytorch.world import join_world, leave_world

    try:
        return train_session(build_trainer, config, join_world(60.0, {}), shards, prepare)
    finally:
        leave_world()


def jax_world(devices: int) -> Any:
    import jax

    from podscale.distributed.rank_group import RankGroup
    from podscale.jax.world import World

    chosen = tuple(jax.devices()[:devices])
    return World(0, 1, chosen, chosen, 60.0, RankGroup.join(RankEnv(), 60.0))


def train_session(
    build: Callable[..., Trainer], config: RunConfig, world: Any, shards: Path, prepare: Prepare
) -> TrainResult:
    """Run the stage as both engines do, with a hook to disturb the session."""
    shard_set, run = ShardSet.open(shards), RunDirectory.for_config(config)
    rank_directory = run.path / "ranks"
    rank_directory.mkdir(parents=True, exist_ok=True)
    with open_training_logger(WorkerEnv(config, "train", str(shards), rank_directory), world) as monitor:
        checkpoints = open_checkpoint_store(config, run, shard_set, None, monitor.checkpoint_reported)
        session = build(config, world, shard_set, checkpoints, monitor, StopRequest())
        prepare(session)
        try:
            return session.train()
        finally:
            session.close()


def state_after(config: RunConfig, step: int) -> dict[str, np.ndarray[Any, Any]]:
    """Return the arrays of a checkpoint."""
    entries = {entry.step: entry for entry in complete_entries(RunDirectory.for_config(config).checkpoints)}
    return read_snapshot(entries[step]).arrays


def lines_of(config: RunConfig, kind: str) -> list[dict[str, Any]]:
    """Return the log's records of one kind: `step`, `evaluation`, `event`."""
    return [
        line for line in filter_replays(read_records(RunDirectory.for_config(config).metrics)) if line["kind"] == kind
    ]


def losses_of(config: RunConfig) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in lines_of(config, "step")}
