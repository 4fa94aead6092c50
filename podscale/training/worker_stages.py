"""Stages of a worker, the same for both engines: training and evaluation."""

import time
from collections.abc import Callable
from typing import TypeVar

from prometheus_client import CollectorRegistry

from podscale.config import RunConfig, result_values
from podscale.data.loaders.base import Loader
from podscale.data.loaders.build_loader import build_loader
from podscale.data.sampler import build_sampler
from podscale.data.shard_set import ShardSet, Split
from podscale.distributed.progress_tracker import ProgressTracker
from podscale.distributed.rank_group import World
from podscale.distributed.worker_env import WorkerEnv
from podscale.errors import InputError, Preempted
from podscale.runs import RunDirectory, predictions
from podscale.runs.checkpoint import CheckpointReport, CheckpointStore, Retention, RunIdentity
from podscale.runs.predictions import Predictions
from podscale.telemetry.events import EventLog
from podscale.telemetry.metrics import EvaluationMetrics
from podscale.telemetry.registry import SnapshotWriter, snapshot_path
from podscale.training.schedules import image_phases
from podscale.training.step_plan import StepPlan
from podscale.training.trainer import Evaluator, Trainer, TrainResult
from podscale.training.training_logger import TrainingLogger, open_training_logger
from podscale.util import env


def open_checkpoint_store(
    config: RunConfig,
    run: RunDirectory,
    shard_set: ShardSet,
    fence: Callable[[], None] | None = None,
    listener: Callable[[CheckpointReport], None] | None = None,
) -> CheckpointStore:
    """Open the checkpoint store of a run directory, with the `fence` and `listener` of `CheckpointStore`."""
    section, manifest = config.checkpoint, shard_set.manifest
    snapshot_steps = StepPlan(config, len(shard_set.split("train"))).snapshot_steps
    return CheckpointStore(
        run.checkpoints,
        RunIdentity(result_values(config), manifest.classes_sha256, manifest.plan_fingerprint),
        Retention(section.keep_last, section.keep_best, snapshot_steps),
        asynchronous=section.asynchronous,
        fence=fence,
        listener=listener,
    )


def open_training_loader(config: RunConfig, split: Split, *, ranks: range, world_size: int, device: str) -> Loader:
    """Open the loader of one process's part of the training batches (see `build_loader`). The caller closes it."""
    sampler, phases = build_sampler(config, split), image_phases(config, len(split))
    return build_loader(config, split, sampler, phases=phases, ranks=ranks, world_size=world_size, device=device)


TrainerBuilder = Callable[[CheckpointStore, TrainingLogger], Trainer]
"""Builds an engine's trainer from this rank's checkpoint store and training logger."""


def run_worker_stage(
    worker_env: WorkerEnv,
    progress_tracker: ProgressTracker,
    training: Callable[[], object],
    evaluation: Callable[[], object],
) -> None:
    """Run the stage named by the worker's environment. Raises InputError for a stage that engines do not have."""
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
    """Train a model. Checkpoints and the final model are written to the run directory."""
    config, fence = worker_env.config, worker_env.fence(run)
    with open_training_logger(worker_env, world, progress_tracker) as logger:
        trainer = build(open_checkpoint_store(config, run, shard_set, fence, logger.checkpoint_reported), logger)
        try:
            return trainer.train()
        except Preempted:
            logger.preempted(trainer.progress.step)
            raise
        finally:
            trainer.close()


AnyEvaluator = TypeVar("AnyEvaluator", bound=Evaluator)


def run_evaluation_stage(
    worker_env: WorkerEnv,
    world: World,
    run: RunDirectory,
    build_evaluator: Callable[[Callable[[int], None]], AnyEvaluator],
    predict: Callable[[AnyEvaluator], Predictions | None],
) -> None:
    """Predict the validation split and write predictions, metrics and the duration to the run directory.

    Args:
        build_evaluator: builds an evaluator from a callback that counts the images of each batch.
        predict: returns the predictions of the whole split on rank 0, None on other ranks. All ranks call it.
    """
    registry = CollectorRegistry()
    metrics = EvaluationMetrics(registry, rank=world.rank, run=worker_env.config.run.id)
    evaluator = build_evaluator(metrics.count_evaluated_images)
    world.barrier()  # so that rank 0 does not count the startup time of other ranks
    started = time.perf_counter()
    with SnapshotWriter(registry, snapshot_path(worker_env.rank_directory, world.rank)):
        try:
            split_predictions = predict(evaluator)
        finally:
            evaluator.close()
        if split_predictions is not None:
            metrics.set_accuracies(*split_predictions.top1_top5_accuracy())
    if split_predictions is not None:
        seconds = round(time.perf_counter() - started, 6)
        predictions.write_predictions(run.predictions, split_predictions)
        with EventLog(run.metrics, worker_env.fence(run)) as events:
            events.event("evaluated", images=len(split_predictions), seconds=seconds, processes=world.size)
    world.barrier()
