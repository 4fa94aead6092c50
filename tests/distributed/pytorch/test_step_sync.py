"""Step status: all ranks receive the same statuses, `STATUS_LAG` steps late, and do not wait before."""

from typing import Any

import torch

from podscale.distributed.step_status import STATUS_LAG, StepStatus
from podscale.pytorch.step_sync import StepSync
from podscale.pytorch.train_step import StepResult
from podscale.pytorch.world import World


def conversation(world: World) -> list[tuple[int, list[StepStatus]]]:
    control = StepSync(world)
    received = []
    for step in range(1, 8):
        result = StepResult(torch.tensor(float(step)), torch.tensor(step != 4))
        control.send(
            step,
            result,
            busy_seconds=0.010 * (1 + (world.rank == step % world.size)),
            stop=(step, world.rank) == (5, 2),
        )
        received.append((step, control.ready()))
    received.append((99, control.drain()))
    return received


def test_statuses_are_equal_on_all_ranks_and_late(run_world: Any) -> None:
    ranks = run_world(4, conversation)
    assert all(received == ranks[0] for received in ranks[1:])
    statuses = {status.step: (at, status) for at, statuses_at in ranks[0] for status in statuses_at}
    assert sorted(statuses) == list(range(1, 8))
    for step, (at, status) in statuses.items():
        assert at == (step + STATUS_LAG if step + STATUS_LAG < 8 else 99)
        assert status == StepStatus(
            step,
            stop_requested=step == 5,
            is_finite=step != 4,
            loss=float(step),
            slowest_rank=step % 4,
            slowest_milliseconds=20,
            fastest_milliseconds=10,
        )


def test_the_time_of_a_long_step_is_clamped(run_world: Any) -> None:
    def body(world: World) -> StepStatus:
        control = StepSync(world)
        control.send(1, StepResult(torch.tensor(0.0), torch.tensor(True)), busy_seconds=1e6, stop=False)
        return control.drain()[0]

    (status,) = run_world(1, body)
    assert (status.slowest_milliseconds, status.fastest_milliseconds) == (2**15 - 1, 2**15 - 1)
