"""What saves cost a real training: the part of benchmarks/telemetry.py about checkpoints.

Seconds that the training loop is held by a save (draining control words, copying the state, handing it over, or waiting
for the writer before), asynchronous and not, against the interval between saves.
"""

import statistics
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from world import run_world

from podscale.config import RunConfig
from podscale.data.shard_set import ShardSet
from podscale.distributed.step_status import StopRequest
from podscale.pytorch.trainer import build_trainer
from podscale.pytorch.world import World
from podscale.runs import RunDirectory
from podscale.telemetry.metrics import TrainMetrics
from podscale.training.trainer import train
from podscale.training.training_logger import TrainingLogger
from podscale.training.worker_stages import open_checkpoint_store

RESNET50 = {"name": "resnet50"}


def saving_training(world: World, document: str, place: str) -> tuple[list[float], float, int]:
    """Trains the document with saves; seconds each save held the loop, seconds of training, and bytes of a save."""
    config = RunConfig.model_validate_json(document)
    run = RunDirectory.for_config(config)
    saved: list[Any] = []
    held: list[float] = []

    class Holding(TrainingLogger):
        def phase(self, name: str) -> AbstractContextManager[None]:
            return _timed(held) if name == "checkpoint" else nullcontext()

    monitor = Holding(TrainMetrics(CollectorRegistry(), rank=0, run="saves", info={}), None, log_every=10)
    shard_set = ShardSet.open(Path(place))
    store = open_checkpoint_store(config, run, shard_set, listener=saved.append)
    session = build_trainer(config, world, shard_set, run.model, store, monitor, StopRequest())
    begin = time.perf_counter()
    train(session)
    seconds = time.perf_counter() - begin
    session.close()
    return held, seconds, saved[0].bytes if saved else 0


class _timed:  # noqa: N801 - reads as a statement
    def __init__(self, into: list[float]) -> None:
        self._into = into

    def __enter__(self) -> None:
        self._begin = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._into.append(time.perf_counter() - self._begin)


def checkpoints(document: dict[str, Any], place: str) -> list[str]:
    """The table of what saves cost a training."""
    lines = [
        "| state | writer | MB | saves | loop held by a save, ms (median, most) | one save an epoch of ImageNet, 3 min "
        "| share here (interval) |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    small: dict[str, Any] = {"checkpoint": {"every_epochs": 1, "keep_last": 2}}
    large = {
        "model": {**RESNET50, "stem": "small"},
        "train": {**document["train"], "epochs": 1, "global_batch": 64},
        "checkpoint": {"every_steps": 4, "every_epochs": 100, "keep_last": 2},
    }
    for name, changes in (("digits, ResNet-18 of width 16", small), ("ResNet-50 with momentum", large)):
        for asynchronous in (True, False):
            run = {**document["run"], "id": f"{'beside' if asynchronous else 'inline'}-{len(lines)}"}
            checkpoint = {**changes["checkpoint"], "keep_best": 0, "asynchronous": asynchronous}
            config = RunConfig.model_validate({**document, **changes, "run": run, "checkpoint": checkpoint})
            held, seconds, size = run_world(2, saving_training, config.model_dump_json(), place)[0]
            interval = seconds / max(1, len(held))
            middle = statistics.median(held)
            lines.append(
                f"| {name} | {'asynchronous' if asynchronous else 'synchronous'} | {size / 1e6:.0f} | {len(held)} "
                f"| {middle * 1e3:.1f}, {max(held) * 1e3:.1f} | {middle / 180:.3%} | {middle / interval:.2%} "
                f"({interval:.1f} s) |"
            )
    return lines
