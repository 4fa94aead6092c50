"""Telemetry files of one rank's training: metrics of every rank; event log, MLPerf log and goodput of rank 0."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from prometheus_client import CollectorRegistry

from podscale.distributed.progress_tracker import ProgressTracker
from podscale.distributed.rank_group import World
from podscale.distributed.worker_env import WorkerEnv
from podscale.errors import Preempted
from podscale.runs import RunDirectory
from podscale.runs.job_start import read_job_start
from podscale.telemetry.events import EventLog, newest_step
from podscale.telemetry.goodput import GoodputTracker, GoodputWriter, after_join, read_goodput_state
from podscale.telemetry.metrics import TrainMetrics
from podscale.telemetry.mlperf_log import MlperfLog
from podscale.telemetry.registry import SampleSource, SnapshotWriter, snapshot_path
from podscale.training.startup_report import StartupReport
from podscale.training.step_timer import StepTimer
from podscale.training.training_logger import TrainingLogger


@contextmanager
def open_training_logger(
    worker_env: WorkerEnv, world: World, progress_tracker: ProgressTracker | None = None
) -> Iterator[TrainingLogger]:
    """Open the training logger of one rank. Its metrics are written in the background until the block ends."""
    config, run = worker_env.config, RunDirectory.for_config(worker_env.config)
    registry, train, fence = CollectorRegistry(), config.train, worker_env.fence(run)
    info = {
        "model": config.model.name,
        "precision": train.precision,
        "optimizer": train.optimizer.name,
        "engine": train.engine,
    }
    metrics = TrainMetrics(registry, rank=world.rank, run=config.run.id, info=info)
    goodput_tracker = open_goodput_tracker(run, worker_env.startup.age()) if world.is_rank0 else None
    timer = StepTimer(metrics, config.telemetry.log_every, progress_tracker, goodput_tracker)
    with ExitStack() as stack:
        log = stack.enter_context(EventLog(run.metrics, fence)) if world.is_rank0 else None
        mlperf = MlperfLog(run.mlperf, config, fence) if world.is_rank0 and config.telemetry.mlperf_log else None
        if mlperf is not None:
            stack.callback(mlperf.close)
        startup = None
        if goodput_tracker is not None:
            startup = StartupReport(worker_env.startup, goodput_tracker, partial(read_job_start, run))
        logger = TrainingLogger(timer, log, mlperf, world.hosts(), startup)
        hang_limit = progress_tracker.hang_limit if progress_tracker is not None else None
        sources: list[SampleSource | None] = [timer.busy_time, hang_limit, logger.stragglers]
        for source in filter(None, [*sources, goodput_tracker, startup]):
            metrics.values.add_source(source)
        stack.enter_context(SnapshotWriter(registry, snapshot_path(worker_env.rank_directory, world.rank)))
        if goodput_tracker is not None:
            stack.enter_context(keep_goodput_file(goodput_tracker, run.goodput, fence))
        yield logger


def open_goodput_tracker(run: RunDirectory, launch_age: float) -> GoodputTracker:
    """Return the goodput tracker of a launch that began `launch_age` seconds ago; it continues the state before."""
    state = read_goodput_state(run.goodput)
    return GoodputTracker(after_join(state, time.time(), launch_age, newest_step(run.metrics)))


@contextmanager
def keep_goodput_file(tracker: GoodputTracker, path: Path, fence: Callable[[], None] | None) -> Iterator[None]:
    """Write goodput heartbeats until the block ends. The last one records the outcome, if it is known here."""
    writer = GoodputWriter(tracker, path, fence)
    outcome = ""
    try:
        yield
        outcome = "done"
    except Preempted:
        outcome = "preempted"
        raise
    finally:
        writer.close(outcome)
