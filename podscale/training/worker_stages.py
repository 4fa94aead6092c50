"""What a rank does in a stage, whichever engine it runs: which stage it is, and a training from beginning to end.

The checkpoints of a run as its document and its shard set ask for them.

The evaluation stage: predictions of every validation sample, written by rank 0.
"""

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry

from podscale.config import RunConfig, result_values
from podscale.data.loaders.base import Loader
from podscale.data.shard_set import ShardSet
from podscale.distributed.progress_tracker import ProgressTracker
from podscale.distributed.rank_group import World
from podscale.distributed.worker_env import WorkerEnv
from podscale.errors import InputError, Preempted
from podscale.runs import RunDirectory, predictions
from podscale.runs.checkpoint import CheckpointReport, CheckpointStore, RunIdentity
from podscale.runs.predictions import Predictions
from podscale.telemetry.events import EventLog
from podscale.telemetry.metrics import EvaluationMetrics
from podscale.telemetry.registry import SnapshotWriter, snapshot_path
from podscale.training.schedules import snapshot_steps
from podscale.training.trainer import Trainer, TrainResult, train
from podscale.training.training_logger import TrainingLogger, open_training_logger
from podscale.util import env


def open_checkpoint_store(
    config: RunConfig,
    run: RunDirectory,
    shard_set: ShardSet,
    fence: Callable[[], None] | None = None,
    listener: Callable[[CheckpointReport], None] | None = None,
) -> CheckpointStore:
    """Those of a run directory; fence and listener: see Checkpoints."""
    manifest = shard_set.manifest
    return CheckpointStore(
        run.checkpoints,
        RunIdentity(result_values(config), manifest.classes_sha256, manifest.plan_fingerprint),
        keep_last=config.checkpoint.keep_last,
        keep_best=config.checkpoint.keep_best,
        snapshot_steps=snapshot_steps(config.checkpoint.snapshots, config.train, len(shard_set.split("train"))),
        asynchronous=config.checkpoint.asynchronous,
        fence=fence,
        listener=listener,
    )


TrainerBuilder = Callable[[CheckpointStore, TrainingLogger], Trainer]
"""An engine's session, of what this rank saves and tells."""


def run_worker_stage(
    worker_env: WorkerEnv,
    progress_tracker: ProgressTracker,
    training: Callable[[], object],
    evaluation: Callable[[], object],
) -> None:
    """Carries out the stage that the place names. Raises InputError for one that engines do not have."""
    match worker_env.stage:
        case "train":
            training()
        case "evaluate":
            progress_tracker.enter_phase("evaluation")
            evaluation()
        case _:
            raise InputError("this engine has the stages train and evaluate", field=env.STAGE, got=worker_env.stage)


def run_training_stage(
    worker_env: WorkerEnv,
    world: World,
    shard_set: ShardSet,
    run: RunDirectory,
    progress_tracker: ProgressTracker,
    build: TrainerBuilder,
) -> TrainResult:
    """Trains; checkpoints and the final model go to the run directory."""
    config, may_write = worker_env.config, worker_env.fence(run)
    with open_training_logger(config, world, run, worker_env.rank_directory, may_write, progress_tracker) as monitor:
        session = build(open_checkpoint_store(config, run, shard_set, may_write, monitor.checkpoint_reported), monitor)
        try:
            return train(session)
        except Preempted:
            monitor.preempted(session.progress.step)
            raise
        finally:
            session.close()


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
