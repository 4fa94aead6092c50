"""Training in the ranks of a benchmark, and the step time of this machine."""

import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry

from benchmarks.world import run_world
from podscale.config import RunConfig
from podscale.data.shard_set import ShardSet
from podscale.distributed.step_status import StopRequest
from podscale.errors import Preempted
from podscale.pytorch.trainer import build_trainer
from podscale.pytorch.world import World
from podscale.runs import RunDirectory
from podscale.runs.checkpoint import CheckpointReport
from podscale.telemetry.metrics import TrainMetrics
from podscale.training.step_timer import StepTimer
from podscale.training.training_logger import TrainingLogger
from podscale.training.worker_stages import open_checkpoint_store


class StepEnd(NamedTuple):
    """End of a step: seconds since 1970, and CPU seconds of the rank's process."""

    time: float
    cpu: float


class StepPace(NamedTuple):
    """Seconds of a step on this machine, and steps of an epoch."""

    step_seconds: float
    epoch_steps: float

    def epochs(self, steps: float) -> float:
        """Return the epochs that hold a number of steps, and one more for rounding."""
        return (steps + 1) / self.epoch_steps


class StepRecorder(TrainingLogger):
    """Training logger that records the end of each step, and requests a stop when `enough(step_ends)` is true."""

    def __init__(
        self, metrics: TrainMetrics, stop: StopRequest, enough: Callable[[list[StepEnd]], bool] | None = None
    ) -> None:
        super().__init__(StepTimer(metrics, log_every=10))
        self.step_ends: list[StepEnd] = []
        self._stop, self._enough = stop, enough

    def step_done(self, step: int, images: int, bad_records: int, *, steps: int = 1) -> None:
        super().step_done(step, images, bad_records, steps=steps)
        self.step_ends.append(StepEnd(time.time(), time.process_time()))
        if self._enough is not None and self._enough(self.step_ends):
            self._stop.requested = True


def run_training(
    world: World,
    config: RunConfig,
    shard_set_directory: str,
    logger: TrainingLogger,
    *,
    stop: StopRequest | None = None,
    listener: Callable[[CheckpointReport], None] | None = None,
) -> float:
    """Train on this rank until the last step or a stop request; return the seconds that took.

    `listener` receives the report of every checkpoint.
    """
    run, shard_set = RunDirectory.for_config(config), ShardSet.open(Path(shard_set_directory))
    store = open_checkpoint_store(config, run, shard_set, listener=listener)
    trainer = build_trainer(config, world, shard_set, store, logger, stop or StopRequest())
    start = time.perf_counter()
    with suppress(Preempted):
        trainer.train()
    seconds = time.perf_counter() - start
    trainer.close()
    return seconds


def measure_pace(config: RunConfig, shard_set: str) -> StepPace:
    """Train a few epochs and return the median step time of the second half."""
    document = config.model_dump(mode="json")
    document["run"]["id"] = "pace"
    images = len(ShardSet.open(Path(shard_set)).split("train"))
    step_ends = run_world(2, _train_timed, RunConfig.model_validate(document).model_dump_json(), shard_set)[0]
    later = step_ends[len(step_ends) // 2 :]
    step = statistics.median(second.time - first.time for first, second in pairwise(later))
    return StepPace(step, images / config.train.global_batch)


def _train_timed(world: World, document: str, shard_set: str) -> list[StepEnd]:
    config, stop = RunConfig.model_validate_json(document), StopRequest()
    recorder = StepRecorder(TrainMetrics(CollectorRegistry(), rank=world.rank, run=config.run.id), stop)
    run_training(world, config, shard_set, recorder, stop=stop)
    return recorder.step_ends


def with_epochs(config: RunConfig, epochs: float) -> RunConfig:
    """Return a copy of the run document with another number of epochs."""
    document: dict[str, Any] = config.model_dump(mode="json")
    document["train"]["epochs"] = epochs
    return RunConfig.model_validate(document)
