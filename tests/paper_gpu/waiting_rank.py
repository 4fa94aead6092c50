"""Rank that only waits for its GPU, in the surroundings of a real worker: heartbeat, report, name of the GPU."""

import torch

from podscale.distributed.failure_report import PeerWatch
from podscale.distributed.worker_env import WorkerEnv
from podscale.pytorch.collective_errors import collective_failures
from podscale.pytorch.gpu_checks import choose_device, describe_gpu
from podscale.pytorch.world import join_torch_rank_group

STEPS = 5


def main() -> None:
    worker_env = WorkerEnv.read()
    with PeerWatch(join_torch_rank_group(60.0), worker_env.exit, collective_failures()) as progress_tracker:
        device = choose_device()
        progress_tracker.device = describe_gpu(device)
        for step in range(STEPS):
            progress_tracker.enter_phase("forward_backward")
            torch.cuda.synchronize(device)
            progress_tracker.step_done(step + 1)


if __name__ == "__main__":
    main()
