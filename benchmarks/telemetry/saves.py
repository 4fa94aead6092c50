"""Cost of saves in a real training: part `checkpoints` of this benchmark.

Seconds that a save holds the training loop (draining control words, copying the state, handing it over, or waiting for
the writer of the save before), asynchronous and not, against the interval between saves.
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


def saving_training(world: World, document: str, place: str) -> tuple[list[float], float, int]:
    """Train the document with saves; returns seconds each save held the loop, seconds of training, bytes of a save."""
    held: list[float] = []
    reports: list[CheckpointReport] = []

    class Holding(StepTimer):
        def phase(self, name: str) -> AbstractContextManager[None]:
            return timed(held) if name == "checkpoint" else nullcontext()

    monitor = TrainingLogger(Holding(TrainMetrics(CollectorRegistry(), rank=0, run="saves", info={}), log_every=10))
    config = RunConfig.model_validate_json(document)
    seconds = run_training(world, config, place, monitor, listener=reports.append)
    sizes = [report.bytes for report in reports if isinstance(report, Saved)]
    return held, seconds, max(sizes, default=0)


@contextmanager
def timed(into: list[float]) -> Iterator[None]:
    """Append the seconds of the block."""
    begin = time.perf_counter()
    yield
    into.append(time.perf_counter() - begin)


def table(document: dict[str, Any], place: str, *, small: bool) -> list[str]:
    """Table of the cost of saves.

    Args:
        document: run document of the digits.
        place: directory of the shard set.
        small: two saves of the digits' network alone.
    """
    lines = [
        "| state | writer | MB | saves | loop held by a save, ms (median, most) | one save an epoch of ImageNet, 3 min "
        "| share here (interval) |",
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
            run = {**document["run"], "id": f"{'beside' if asynchronous else 'inline'}-{len(lines)}"}
            checkpoint = {**changes["checkpoint"], "keep_last": 2, "keep_best": 0, "asynchronous": asynchronous}
            config = RunConfig.model_validate({**document, **changes, "run": run, "checkpoint": checkpoint})
            held, seconds, size = run_world(2, saving_training, config.model_dump_json(), place)[0]
            if not held or not size:
                raise SystemExit(f"{name}: nothing was saved, so there is nothing to tell")
            writer = "asynchronous" if asynchronous else "synchronous"
            lines.append(f"| {name} | {writer} | {size / 1e6:.0f} | {len(held)} | {_shares(held, seconds)} |")
    return lines


def _shares(held: list[float], seconds: float) -> str:
    """Cells on how long the loop was held, in ms and as a fraction of two intervals."""
    middle, interval = statistics.median(held), seconds / len(held)
    return (
        f"{middle * 1e3:.1f}, {max(held) * 1e3:.1f} | {middle / 180:.3%} | {middle / interval:.2%} ({interval:.1f} s)"
    )
