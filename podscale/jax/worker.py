"""Worker process of one rank: `python -m podscale.jax.worker`, started by our launcher under the supervisor.

It reads its `WorkerEnv` from the environment, checks that all ranks agree on their configuration, and runs one stage.
launch.worker_main, which runs this in its process, records the exit.
"""

import logging
import os

from podscale.distributed.failure_report import PeerWatch
from podscale.distributed.progress_tracker import ProgressTracker
from podscale.distributed.rank_group import RankGroup
from podscale.distributed.step_status import StopRequest
from podscale.distributed.worker_env import WorkerEnv
from podscale.errors import Preempted
from podscale.jax.collective_errors import collective_failures
from podscale.jax.gpu_checks import check_gpus, choose_gpus, describe_gpus, device_kind
from podscale.jax.software import keep_to_cpu_without_gpus, library_versions
from podscale.jax.xla_flags import xla_environment
from podscale.runs import RunDirectory
from podscale.training.startup_checks import open_agreed_shard_set
from podscale.training.worker_stages import run_worker_stage
from podscale.util import host_info


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    worker_env = WorkerEnv.read()
    worker_env.startup.end_part("imports")
    launch, stacks = worker_env.config.launch, RunDirectory.for_config(worker_env.config).hang_stacks
    rank_group = RankGroup.join(worker_env.rank_env, launch.timeout_seconds)
    with PeerWatch(
        rank_group, worker_env.exit, collective_failures(), hang_seconds=launch.hang_seconds, stack_directory=stacks
    ) as progress_tracker:
        run_stage(worker_env, rank_group, progress_tracker)


def run_stage(worker_env: WorkerEnv, rank_group: RankGroup, progress_tracker: ProgressTracker) -> None:
    """Open the shard set, join the other processes and run the stage.

    A stop request ends an evaluation at once (worker_main has the handler), since it has nothing to save. JAX is
    imported once all processes agree, so errors of the document are reported before.
    """
    stop = StopRequest()
    if worker_env.stage == "train":
        stop.install()
    keep_to_cpu_without_gpus()
    device = device_kind()
    shard_set = open_agreed_shard_set(worker_env, rank_group, device=device, libraries=library_versions())
    os.environ.update(xla_environment(device, os.environ, next(iter(host_info.tpu_chips()), None)))
    worker_env.startup.end_part("rendezvous")
    from podscale.jax.worker_stages import run_evaluation, run_training
    from podscale.jax.world import join_world, leave_world

    worker_env.startup.end_part("imports")
    world = join_world(rank_group, gpus=choose_gpus(rank_group, worker_env.rank_env))
    check_gpus(device, world.devices, world.rank)
    progress_tracker.device = describe_gpus(world.local_devices)
    worker_env.startup.end_part("rendezvous")
    run = RunDirectory.for_config(worker_env.config)
    try:
        run_worker_stage(
            worker_env,
            progress_tracker,
            training=lambda: run_training(worker_env, world, shard_set, run, stop, progress_tracker),
            evaluation=lambda: run_evaluation(worker_env, world, shard_set, run),
        )
    except Preempted:
        leave_world(world)
        raise
    leave_world(world)


if __name__ == "__main__":
    main()
