"""Worker process of one rank: `python -m podscale.pytorch.worker`, started under the supervisor.

It reads its `WorkerEnv` from the environment, checks that all ranks agree on their configuration, and runs one stage.
launch.worker_main, which runs this in its process, records the exit.
"""

import logging

import torch

from podscale.data.shard_set import ShardSet
from podscale.distributed.failure_report import PeerWatch
from podscale.distributed.progress_tracker import ProgressTracker
from podscale.distributed.rank_group import RankGroup
from podscale.distributed.step_status import StopRequest
from podscale.distributed.worker_env import WorkerEnv
from podscale.errors import Preempted
from podscale.pytorch.all_reduce.auto import resolve_all_reduce
from podscale.pytorch.collective_errors import collective_failures
from podscale.pytorch.device_prefetcher import DevicePrefetcher
from podscale.pytorch.ensemble_evaluation import evaluate_ensemble
from podscale.pytorch.evaluator import Evaluator
from podscale.pytorch.gpu_checks import check_gpu, describe_gpu
from podscale.pytorch.kernel_choice import resolve_fused_kernels
from podscale.pytorch.precision import build_precision, set_numerics
from podscale.pytorch.software import library_versions
from podscale.pytorch.stored_choice import StoredChoice
from podscale.pytorch.train_state import load_weights_file
from podscale.pytorch.trainer import PyTorchTrainer, build_model_on_device, build_trainer
from podscale.pytorch.world import World, join_torch_rank_group, join_world, leave_world
from podscale.runs import RunDirectory
from podscale.runs.checkpoint import CheckpointStore
from podscale.runs.ensemble_members import combined_model_directories
from podscale.runs.model_files import WEIGHTS_FILE
from podscale.training.startup_checks import open_agreed_shard_set
from podscale.training.step_timer import untimed
from podscale.training.training_logger import TrainingLogger
from podscale.training.worker_stages import run_evaluation_stage, run_training_stage, run_worker_stage
from podscale.util import env


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    worker_env = WorkerEnv.read()
    worker_env.startup.end_part("imports")
    launch, stacks = worker_env.config.launch, RunDirectory.for_config(worker_env.config).hang_stacks
    rank_group = join_torch_rank_group(launch.timeout_seconds)
    try:
        with PeerWatch(
            rank_group, worker_env.exit, collective_failures(), hang_seconds=launch.hang_seconds, stack_directory=stacks
        ) as progress_tracker:
            run_stage(worker_env, rank_group, progress_tracker)
    except Preempted:
        leave_world(rank_group)
        raise
    leave_world(rank_group)


def run_stage(worker_env: WorkerEnv, rank_group: RankGroup, progress_tracker: ProgressTracker) -> None:
    """Open the shard set, join the other ranks and run the stage.

    A stop request ends an evaluation at once (worker_main has the handler), since it has nothing to save.
    """
    stop = StopRequest()
    if worker_env.stage == "train":
        stop.install()
    if threads := env.read_number(env.OMP_NUM_THREADS):
        torch.set_num_threads(threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shard_set = open_agreed_shard_set(
        worker_env,
        rank_group,
        device=device,
        libraries=library_versions(),
        check_device=lambda: check_gpu(worker_env.config.train),
    )
    world = join_world(rank_group.timeout_seconds, rank_group=rank_group)
    progress_tracker.device = describe_gpu(world.device)
    worker_env.startup.end_part("rendezvous")
    run = RunDirectory.for_config(worker_env.config)
    evaluate = evaluate_ensemble if combined_model_directories(worker_env.config) else run_evaluation
    run_worker_stage(
        worker_env,
        progress_tracker,
        training=lambda: run_training(worker_env, world, shard_set, run, stop, progress_tracker),
        evaluation=lambda: evaluate(worker_env, world, shard_set, run),
    )


def run_training(
    worker_env: WorkerEnv,
    world: World,
    shard_set: ShardSet,
    run: RunDirectory,
    stop: StopRequest,
    progress_tracker: ProgressTracker,
) -> None:
    def build(checkpoint_store: CheckpointStore, logger: TrainingLogger) -> PyTorchTrainer:
        classes, fence = len(shard_set.classes), worker_env.fence(run)
        algorithm = StoredChoice(run.all_reduce, fence, logger.all_reduce_chosen)
        kernels = StoredChoice(run.fused_kernels, fence, logger.fused_kernels_chosen)
        config = resolve_all_reduce(worker_env.config, world, classes, algorithm)
        config = resolve_fused_kernels(config, world, classes, kernels)
        return build_trainer(config, world, shard_set, checkpoint_store, logger, stop)

    run_training_stage(worker_env, world, shard_set, run, progress_tracker, build)


def run_evaluation(worker_env: WorkerEnv, world: World, shard_set: ShardSet, run: RunDirectory) -> None:
    """Evaluate the final model. Rank 0 writes the predictions of every sample to the run directory."""
    config = worker_env.config
    set_numerics(config.train)
    model = build_model_on_device(config, world, len(shard_set.classes))
    precision = build_precision(config.train, world)
    precision.cast_parameters(model)
    load_weights_file(model, run.model / WEIGHTS_FILE)
    run_evaluation_stage(
        worker_env,
        world,
        run,
        lambda count_images: Evaluator(config, world, shard_set, precision, DevicePrefetcher(world), count_images),
        lambda evaluator: evaluator.predict(model, untimed),
    )


if __name__ == "__main__":
    main()
