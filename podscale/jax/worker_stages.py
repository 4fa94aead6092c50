"""Stages of a worker on JAX: training and evaluation."""

from podscale import models
from podscale.data.shard_set import ShardSet
from podscale.distributed.progress_tracker import ProgressTracker
from podscale.distributed.step_status import StopRequest
from podscale.distributed.worker_env import WorkerEnv
from podscale.errors import InputError
from podscale.jax.evaluator import Evaluator
from podscale.jax.mesh import mesh_for_config, put_replicated
from podscale.jax.program_cache import enable_program_cache
from podscale.jax.train_state import load_weights_file
from podscale.jax.train_step import build_layout
from podscale.jax.trainer import build_trainer
from podscale.jax.world import World
from podscale.runs import RunDirectory, programs_directory
from podscale.runs.ensemble_members import combined_model_directories
from podscale.runs.model_files import WEIGHTS_FILE
from podscale.training.step_timer import untimed
from podscale.training.trainer import TrainResult
from podscale.training.worker_stages import run_evaluation_stage, run_training_stage


def run_training(
    worker_env: WorkerEnv,
    world: World,
    shard_set: ShardSet,
    run: RunDirectory,
    stop: StopRequest,
    progress_tracker: ProgressTracker,
) -> TrainResult:
    """Train a model. Checkpoints and the final model are written to the run directory."""
    enable_program_cache(programs_directory(worker_env.config.run.workspace))
    return run_training_stage(
        worker_env,
        world,
        shard_set,
        run,
        progress_tracker,
        lambda store, logger: build_trainer(worker_env.config, world, shard_set, store, logger, stop),
    )


def run_evaluation(worker_env: WorkerEnv, world: World, shard_set: ShardSet, run: RunDirectory) -> None:
    """Evaluate the final model. Process 0 writes the predictions of every sample to the run directory."""
    config = worker_env.config
    if combined_model_directories(config):
        raise InputError(
            "the JAX engine evaluates one model, and this document has several evaluated together",
            field="train.engine",
            got="jax",
            hint="Set train.engine=pytorch for the evaluation: models do not depend on the engine that trained them.",
        )
    enable_program_cache(programs_directory(config.run.workspace))
    mesh = mesh_for_config(config, world.devices, world.processes_per_node)
    spec = models.model_spec(config.model, len(shard_set.classes))
    parameters, statistics = load_weights_file(spec, run.model / WEIGHTS_FILE)
    layout = build_layout(config, mesh, spec)
    buckets, statistics = put_replicated((layout.pack_on_host(parameters), statistics), mesh)
    run_evaluation_stage(
        worker_env,
        world,
        run,
        lambda count_images: Evaluator(config, world, mesh, layout, shard_set, count_images),
        lambda evaluator: evaluator.predict(buckets, statistics, untimed),
    )
