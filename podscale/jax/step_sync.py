"""Step status of every call (see podscale.distributed.step_status), reduced in the program that runs the steps.

The status of a process is an input of the program, next to the batches; its maximum is an output, next to losses and
norms, whose copy to the host starts as soon as they are ready. The program itself knows whether a step was masked, the
same on all devices.
"""

from collections import deque
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding

from podscale.distributed.step_status import STATUS_LAG, StepStatus, pack, unpack
from podscale.distributed.waits import STEP_STATUS, waiting_for
from podscale.jax.mesh import RANKS, assemble_array, axis_size, put_replicated
from podscale.jax.train_step import STATUS_SPEC, StepInputs, StepResults


class StepSync:
    """Status of this process for each call, and the agreed ones that are due. All processes make the same calls."""

    def __init__(self, mesh: Mesh, rank: int, local_ranks: int, lag: int = STATUS_LAG) -> None:
        """Prepare for a process with `local_ranks` mesh ranks; `lag` is the delay of a status, calls."""
        self._mesh, self._sharding, self._ranks = mesh, NamedSharding(mesh, STATUS_SPEC), axis_size(mesh, RANKS)
        self._rank, self._local_ranks, self._lag = rank, local_ranks, lag
        self._pending: deque[tuple[int, int, StepResults]] = deque()
        """Steps before each call, steps of it, and its results."""
        self._last_status: tuple[list[int], Array] | None = None
        self._counts: dict[int, Array] = {}

    @waiting_for(STEP_STATUS)
    def step_inputs(self, count: int, *, stop: bool, busy_seconds: float) -> StepInputs:
        """Return the inputs of the next call, which runs `count` steps.

        They are on the devices already: a host number would be copied to the devices with every call.
        """
        if count not in self._counts:
            self._counts[count] = put_replicated(np.int32(count), self._mesh)
        return StepInputs(self._counts[count], self.local_status(stop=stop, busy_seconds=busy_seconds))

    def local_status(self, *, stop: bool, busy_seconds: float) -> Array:
        """Return this process's packed statuses for the next call, int32 [ranks, 4]."""
        status = pack(self._rank, stop=stop, busy_seconds=busy_seconds)
        if self._last_status is None or self._last_status[0] != status:
            statuses = np.tile(np.array(status, np.int32), (self._local_ranks, 1))
            self._last_status = status, assemble_array(statuses, self._sharding, dim=0, length=self._ranks)
        return self._last_status[1]

    def send(self, step: int, count: int, results: StepResults) -> None:
        """Start the copy of a call's results to the host: `count` steps after `step`."""
        for array in results:
            if array is not None:
                array.copy_to_host_async()
        self._pending.append((step, count, results))

    def ready(self) -> list[StepStatus]:
        """Return the statuses of calls at least `lag` ago that were not returned yet, oldest first."""
        return self._pop_ready(self._lag)

    def drain(self) -> list[StepStatus]:
        """Return all statuses that were not returned yet; waits for the newest."""
        return self._pop_ready(0)

    def _pop_ready(self, keep: int) -> list[StepStatus]:
        statuses: list[StepStatus] = []
        while len(self._pending) > keep:
            statuses += _read_statuses(*self._pending.popleft())
        return statuses


@waiting_for(STEP_STATUS)
def _read_statuses(steps_before: int, count: int, on_device: StepResults) -> list[StepStatus]:
    results: Any = jax.tree.map(lambda array: array.tolist(), jax.device_get(on_device))
    return [
        unpack(
            steps_before + number + 1,
            [results.status[0], not results.finite[number], *results.status[2:]],
            results.loss[number],
            None if results.grad_norm is None else results.grad_norm[number],
        )
        for number in range(count)
    ]
