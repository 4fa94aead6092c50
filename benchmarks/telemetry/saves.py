"""Part `checkpoints`: time that a save blocks the training loop, asynchronous and synchronous.

A save drains step statuses, copies the state, and hands it to the writer or waits for the writer's previous save. The
time is compared with the interval between saves.
"""

import statistics
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from prometheus_client import CollectorRegistry

from benchmarks.telemetry.training import run_training
from benchmarks.world import run_world
from podscale.config import RunConfig
from podscale.pytorch.world import World
from podscale.runs.checkpoint import CheckpointReport, Saved
from podscale.telemetry.metrics import TrainMetrics
from podscale.training.step_timer import StepTimer
from podscale.training.training_logger import TrainingLogger

RESNET50 = {"name": "resnet50", "stem": "small"}


def train_with_saves(world: World, document: str, shard_set: str) -> tuple[list[float], float, int]:
    """Train; return the seconds that each save blocked the loop, the seconds of training, and the bytes of a save."""
    blocked: list[float] = []
    reports: list[CheckpointReport] = []

    class SaveTimer(StepTimer):
        def phase(self, name: str) -> AbstractContextManager[None]:
            return timed(blocked) if name == "checkpoint" else nullcontext()

    logger = TrainingLogger(SaveTimer(TrainMetrics(CollectorRegistry(), rank=0, run="saves", info={}), log_every=10))
    config = RunConfig.model_validate_json(document)
    seconds = run_training(world, config, shard_set, logger, listener=reports.append)
    sizes = [report.bytes for report in reports if isinstance(report, Saved)]
    return blocked, seconds, max(sizes, default=0)


@contextmanager
def timed(seconds: list[float]) -> Iterator[None]:
    """Append the seconds of the block."""
    start = time.perf_counter()
    yield
    seconds.append(time.perf_counter() - start)


def table(document: dict[str, Any], shard_set: str, *, small: bool) -> list[str]:
    """Return the table of the time of saves. The small form measures two saves of the digits' model only."""
    lines = [
        "| state | writer | MB | saves | loop blocked by a save, ms (median, maximum) "
        "| fraction of time at one save per 3 min, an epoch of ImageNet | fraction of time here (interval) |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    train = document["train"]
    states: dict[str, dict[str, Any]] = {
        f"digits, ResNet-18 of width {document['model']['width']}": {
            "train": {**train, "epochs": 1 if small else 6},
            "checkpoint": {"every_epochs": 0.5 if small else 1},
        },
        "ResNet-50 with momentum": {
            "model": RESNET50,
            "train": {**train, "epochs": 1},
            "checkpoint": {"every_steps": 4, "every_epochs": 100},
        },
    }
    for name, changes in list(states.items())[: 1 if small else None]:
        for asynchronous in (True, False):
            writer = "asynchronous" if asynchronous else "synchronous"
            run = {**document["run"], "id": f"{writer}-{len(lines)}"}
            checkpoint = {**changes["checkpoint"], "keep_last": 2, "keep_best": 0, "asynchronous": asynchronous}
            config = RunConfig.model_validate({**document, **changes, "run": run, "checkpoint": checkpoint})
            blocked, seconds, size = run_world(2, train_with_saves, config.model_dump_json(), shard_set)[0]
            if not blocked or not size:
                raise SystemExit(f"{name}: no checkpoint was saved")
            lines.append(f"| {name} | {writer} | {size / 1e6:.0f} | {len(blocked)} | {_shares(blocked, seconds)} |")
    return lines


def _shares(blocked: list[float], seconds: float) -> str:
    """Return the cells on the time that the loop was blocked, in ms and as a fraction of two intervals."""
    median, interval = statistics.median(blocked), seconds / len(blocked)
    maximum = max(blocked) * 1e3
    return f"{median * 1e3:.1f}, {maximum:.1f} | {median / 180:.3%} | {median / interval:.2%} ({interval:.1f} s)"
