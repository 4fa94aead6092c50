"""A rank of a JAX world for tests: runs PODSCALE_TEST_BODY (module:function) as `podscale.jax.worker` runs a stage.

Run by `launch.rankprocess`; the body is given the world and the whereabouts, and what it returns goes as JSON to
answer-<rank>.json in the rank directory.
"""

import importlib
import json
import os
from pathlib import Path

from podscale.distributed.rank_group import join_rank_group
from podscale.distributed.worker_env import read_rank_env
from podscale.distributed.worker_exit import WorkerReport, report_and_exit
from podscale.errors import PodscaleError
from podscale.jax.collective_errors import watch_jax_peers

BODY, TIMEOUT = "PODSCALE_TEST_BODY", "PODSCALE_TEST_TIMEOUT"
BEAT = 0.25


def main() -> None:
    seat, directory = read_rank_env(), Path(os.environ["PODSCALE_RANK_DIR"])
    module, _, name = os.environ[BODY].partition(":")

    def end(error: PodscaleError) -> None:
        report_and_exit(directory, seat.rank, WorkerReport(int(error.exit_code), str(error)))

    meeting = join_rank_group(seat, float(os.environ[TIMEOUT]))
    with watch_jax_peers(meeting, end, interval_seconds=BEAT, stack_directory=directory / "hang") as whereabouts:
        from podscale.jax.world import join_world, leave_world

        world = join_world(meeting)
        answer = getattr(importlib.import_module(module), name)(world, whereabouts)
        (directory / f"answer-{seat.rank}.json").write_text(json.dumps(answer))
        leave_world(world)


if __name__ == "__main__":
    main()
