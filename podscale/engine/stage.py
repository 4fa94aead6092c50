"""What a rank does in a stage, whichever engine it runs: which stage it is, and a training from beginning to end."""

from collections.abc import Callable

from podscale.data.shard_set import ShardSet
from podscale.distributed.progress_tracker import ProgressTracker
from podscale.distributed.rank_group import World
from podscale.distributed.worker_env import WorkerEnv
from podscale.engine.checkpoints import open_checkpoint_store
from podscale.engine.monitor import TrainingLogger, open_training_logger
from podscale.engine.session import Trainer
from podscale.engine.trainer import TrainResult, train
from podscale.errors import InputError, Preempted
from podscale.runs import RunDirectory
from podscale.runs.checkpoint import CheckpointStore
from podscale.util import env

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
