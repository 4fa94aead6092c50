"""One training in the ranks of a benchmark, and the pace of this machine at it."""

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


class Moment(NamedTuple):
    """End of a step: seconds since 1970, and CPU seconds of the rank's process until then."""

    time: float
    cpu: float


class Pace(NamedTuple):
    """Seconds of a step on this machine, and steps of an epoch."""

    step: float
    steps: float

    def epochs(self, steps: float) -> float:
        """Epochs of so many steps, and one more step for rounding."""
        return (steps + 1) / self.steps


class Recorder(TrainingLogger):
    """A monitor that records when steps end, and asks for a stop when `enough(moments)` is true."""

    def __init__(
        self, metrics: TrainMetrics, stop: StopRequest, enough: Callable[[list[Moment]], bool] | None = None
    ) -> None:
        super().__init__(StepTimer(metrics, log_every=10))
        self.moments: list[Moment] = []
        self._stop, self._enough = stop, enough

    def step_done(self, step: int, images: int, bad_records: int, *, steps: int = 1) -> None:
        super().step_done(step, images, bad_records, steps=steps)
        self.moments.append(Moment(time.time(), time.process_time()))
        if self._enough is not None and self._enough(self.moments):
            self._stop.requested = True


def run_training(
    world: World,
    config: RunConfig,
    place: str,
    monitor: TrainingLogger,
    *,
    stop: StopRequest | None = None,
    listener: Callable[[CheckpointReport], None] | None = None,
) -> float:
    """Train the document on this rank, until its end or a stop request; returns the seconds it took.

    Args:
        world: of the ranks.
        config: run document.
        place: directory of the shard set.
        monitor: told of every step.
        stop: request to stop, agreed by the ranks.
        listener: told of every save.
    """
    run, shard_set = RunDirectory.for_config(config), ShardSet.open(Path(place))
    store = open_checkpoint_store(config, run, shard_set, listener=listener)
    session = build_trainer(config, world, shard_set, store, monitor, stop or StopRequest())
    begin = time.perf_counter()
    with suppress(Preempted):
        session.train()
    seconds = time.perf_counter() - begin
    session.close()
    return seconds


def measure_pace(config: RunConfig, place: str) -> Pace:
    """Train a few epochs and return the median step of the second half."""
    document = config.model_dump(mode="json")
    document["run"]["id"] = "pace"
    images = len(ShardSet.open(Path(place)).split("train"))
    moments = run_world(2, _train_timed, RunConfig.model_validate(document).model_dump_json(), place)[0]
    later = moments[len(moments) // 2 :]
    step = statistics.median(second.time - first.time for first, second in pairwise(later))
    return Pace(step, images / config.train.global_batch)


def _train_timed(world: World, document: str, place: str) -> list[Moment]:
    config, stop = RunConfig.model_validate_json(document), StopRequest()
    recorder = Recorder(TrainMetrics(CollectorRegistry(), rank=world.rank, run=config.run.id), stop)
    run_training(world, config, place, recorder, stop=stop)
    return recorder.moments


def lengthened(config: RunConfig, epochs: float) -> RunConfig:
    """The same document with so many epochs."""
    document: dict[str, Any] = config.model_dump(mode="json")
    document["train"]["epochs"] = epochs
    return RunConfig.model_validate(document)
