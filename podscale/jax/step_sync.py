"""The control word of every call (see podscale.distributed.step_status): it travels in the program that carries out the updates.

What a process has to say goes in with the batches, and comes out under MAX with losses and norms, whose way to the host
begins as soon as they are there. Whether an update was masked the program knows by itself, the same on all devices.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding

from podscale.distributed.step_status import STATUS_LAG, StepStatus, pack, unpack
from podscale.distributed.waits import CONTROL, waiting_for
from podscale.jax.mesh import RANKS, assemble_array, axis_size, put_replicated
from podscale.jax.train_step import STATUS_SPEC, StepInputs, StepResults


@dataclass(frozen=True)
class _PendingStatus:
    first_step: int
    step_count: int
    results: StepResults


class StepSync:
    """Makes the words of this process, and hands out those that are due. Every process must make the same calls."""

    def __init__(self, mesh: Mesh, rank: int, local_ranks: int, lag: int = STATUS_LAG) -> None:
        """rank: the number of this process. local_ranks: how many ranks of the mesh are its own. lag: in calls."""
        self._mesh, self._sharding, self._ranks = mesh, NamedSharding(mesh, STATUS_SPEC), axis_size(mesh, RANKS)
        self._rank, self._local_ranks, self._lag = rank, local_ranks, lag
        self._pending: deque[_PendingStatus] = deque()
        self._last_status: tuple[list[int], Array] | None = None
        self._counts: dict[int, Array] = {}

    @waiting_for(CONTROL)
    def step_inputs(self, count: int, *, stop: bool, busy_seconds: float) -> StepInputs:
        """What this process has to say with the next call, which carries out `count` updates; busy in seconds.

        All of it is on the devices already: a number handed to a program would go there by itself, with every call.
        """
        if count not in self._counts:
            self._counts[count] = put_replicated(np.int32(count), self._mesh)
        return StepInputs(self._counts[count], self.local_status(stop=stop, busy_seconds=busy_seconds))

    def local_status(self, *, stop: bool, busy_seconds: float) -> Array:
        """What this process has to say with the next call; busy in seconds."""
        words = pack(self._rank, stop=stop, busy_seconds=busy_seconds)
        if self._last_status is None or self._last_status[0] != words:
            mine = np.tile(np.array(words, np.int32), (self._local_ranks, 1))
            self._last_status = words, assemble_array(mine, self._sharding, dim=0, length=self._ranks)
        return self._last_status[1]

    def send(self, step: int, count: int, results: StepResults) -> None:
        """A call is on its way that carries out `count` updates after `step`."""
        for array in results:
            if array is not None:
                array.copy_to_host_async()
        self._pending.append(_PendingStatus(step, count, results))

    def ready(self) -> list[StepStatus]:
        """The words of calls at least `lag` ago that were not handed out yet, oldest first."""
        return self._pop_ready(self._lag)

    def drain(self) -> list[StepStatus]:
        """Every word not handed out yet; waits for the newest."""
        return self._pop_ready(0)

    def _pop_ready(self, keep: int) -> list[StepStatus]:
        words: list[StepStatus] = []
        while len(self._pending) > keep:
            words += _read_statuses(self._pending.popleft())
        return words


@waiting_for(CONTROL)
def _read_statuses(pending: _PendingStatus) -> list[StepStatus]:
    told: Any = jax.tree.map(lambda array: array.tolist(), jax.device_get(pending.results))
    return [
        unpack(
            pending.first_step + number + 1,
            [told.status[0], not told.finite[number], *told.status[2:]],
            told.loss[number],
            None if told.grad_norm is None else told.grad_norm[number],
        )
        for number in range(pending.step_count)
    ]
