"""Rank of a JAX world for tests: runs PODSCALE_TEST_BODY (module:function) as `podscale.jax.worker` runs a stage.

Run by `launch.worker_main`. The body receives the world and the progress tracker; its result is written as JSON to
answer-<rank>.json in the rank directory.
"""

import importlib
import json
import os

from podscale.distributed.failure_report import PeerWatch
from podscale.distributed.rank_group import RankGroup
from podscale.distributed.worker_env import WorkerEnv
from podscale.jax.collective_errors import collective_failures

BODY, TIMEOUT = "PODSCALE_TEST_BODY", "PODSCALE_TEST_TIMEOUT"
BEAT = 0.25


def main() -> None:
    from podscale.jax.world import join_world, leave_world  # takes seconds, which no timeout shall count

    worker_env = WorkerEnv.read()
    directory, rank = worker_env.rank_directory, worker_env.rank_env.rank
    module, _, name = os.environ[BODY].partition(":")
    rank_group = RankGroup.join(worker_env.rank_env, float(os.environ[TIMEOUT]))
    with PeerWatch(
        rank_group, worker_env.exit, collective_failures(), interval_seconds=BEAT, stack_directory=directory / "hang"
    ) as progress_tracker:
        world = join_world(rank_group)
        answer = getattr(importlib.import_module(module), name)(world, progress_tracker)
        (directory / f"answer-{rank}.json").write_text(json.dumps(answer))
        leave_world(world)


if __name__ == "__main__":
    main()
