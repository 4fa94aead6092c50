"""A rank of a JAX world for tests: runs PODSCALE_TEST_BODY (module:function) as `podscale.jax.rank` runs a stage.

Run by `launch.rankprocess`; the body is given the world and the whereabouts, and what it returns goes as JSON to
answer-<rank>.json in the rank directory.
"""

import importlib
import json
import os
from pathlib import Path

from podscale.engine.meeting import meet
from podscale.engine.seat import read_seat
from podscale.errors import PodscaleError
from podscale.jax.failure import watched
from podscale.worker_exit import RankOutcome, end_process

BODY, TIMEOUT = "PODSCALE_TEST_BODY", "PODSCALE_TEST_TIMEOUT"
BEAT = 0.25


def main() -> None:
    seat, directory = read_seat(), Path(os.environ["PODSCALE_RANK_DIR"])
    module, _, name = os.environ[BODY].partition(":")

    def end(error: PodscaleError) -> None:
        end_process(directory, seat.rank, RankOutcome(int(error.exit_code), str(error)))

    meeting = meet(seat, float(os.environ[TIMEOUT]))
    with watched(meeting, end, seconds=BEAT, stacks=directory / "hang") as whereabouts:
        from podscale.jax import world as worlds

        world = worlds.join(meeting)
        answer = getattr(importlib.import_module(module), name)(world, whereabouts)
        (directory / f"answer-{seat.rank}.json").write_text(json.dumps(answer))
        worlds.leave(world)


if __name__ == "__main__":
    main()
