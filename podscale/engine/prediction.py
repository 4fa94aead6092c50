"""The evaluation stage: predictions of every validation sample, written by rank 0."""

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry

from podscale.data.loaders.base import Loader
from podscale.distributed.rank_group import World
from podscale.distributed.worker_env import WorkerEnv
from podscale.runs import RunDirectory, predictions
from podscale.runs.predictions import Predictions
from podscale.telemetry.events import EventLog
from podscale.telemetry.metrics import EvaluationMetrics
from podscale.telemetry.registry import SnapshotWriter, snapshot_path

PredictFunction = Callable[[], Predictions | None]
"""The predictions of the whole split on rank 0, None elsewhere; all ranks call it."""


def run_evaluation_stage(
    worker_env: WorkerEnv,
    world: World,
    run: RunDirectory,
    prepare: Callable[[Callable[[int], None]], tuple[Loader, PredictFunction]],
    barrier: Callable[[], None],
) -> None:
    """Has an engine predict, counts what it does, and leaves predictions and their time in the run directory.

    prepare: takes what hears how many samples each batch held.
    """
    registry = CollectorRegistry()
    metrics = EvaluationMetrics(registry, rank=world.rank, run=worker_env.config.run.id)
    loader, predict = prepare(metrics.count_evaluated_images)
    barrier()  # so that rank 0 does not count the time in which others are still starting
    started = time.perf_counter()
    with SnapshotWriter(registry, snapshot_path(worker_env.rank_directory, world.rank)):
        try:
            found = predict()
        finally:
            loader.close()
        if found is not None:
            metrics.set_accuracies(*found.top1_top5_accuracy())
    if found is not None:
        seconds = round(time.perf_counter() - started, 6)
        predictions.write_predictions(run.predictions, found)
        with EventLog(run.metrics, worker_env.fence(run)) as events:
            events.event("evaluated", images=len(found), seconds=seconds, processes=world.size)
    barrier()
