"""Exchange of the step status in one small all-reduce; loss and gradient norm reach the host with the same delay."""

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor
from torch import distributed as dist

from podscale.distributed.step_status import STATUS_LAG, StepStatus, pack, unpack
from podscale.distributed.waits import STEP_STATUS, waiting_for
from podscale.pytorch.train_step import StepResult
from podscale.pytorch.world import World


@dataclass(frozen=True)
class _PendingStatus:
    step: int
    status: Tensor
    loss_and_norm: Tensor
    work: "dist.Work | torch.cuda.Event | None"


class StepSync:
    """Exchange of the status of every step. Every rank must send the same steps."""

    def __init__(self, world: World, lag: int = STATUS_LAG) -> None:
        self._world, self._lag = world, lag
        self._group = world.consecutive_group(world.size)
        self._stream = torch.cuda.Stream(world.device) if world.on_gpu else None
        self._pending: deque[_PendingStatus] = deque()

    @waiting_for(STEP_STATUS)
    def send(self, step: int, result: StepResult, *, busy_seconds: float, stop: bool) -> None:
        """Send the status of a step; `busy_seconds` is this rank's mean busy time per step."""
        status = torch.tensor(pack(self._world.rank, stop=stop, busy_seconds=busy_seconds), dtype=torch.int32)
        if self._stream is None:
            status[1] = (~result.finite).to(torch.int32)
            work = dist.all_reduce(status, dist.ReduceOp.MAX, group=self._group, async_op=True)
            self._pending.append(_PendingStatus(step, status, result.loss_and_norm, work))
        else:
            self._pending.append(self._send_from_gpu(step, status, result, self._stream))

    def ready(self) -> list[StepStatus]:
        """Return the statuses of steps at least `lag` ago that were not returned yet, oldest first."""
        return self._pop_ready(self._lag)

    def drain(self) -> list[StepStatus]:
        """Return all statuses that were not returned yet; waits for the newest."""
        return self._pop_ready(0)

    def _send_from_gpu(
        self, step: int, packed: Tensor, result: StepResult, stream: torch.cuda.Stream
    ) -> _PendingStatus:
        device = self._world.device
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            status = packed.pin_memory().to(device, non_blocking=True)
            status[1] = (~result.finite).to(torch.int32)
            dist.all_reduce(status, dist.ReduceOp.MAX, group=self._group)
            status_on_host = torch.empty(len(packed), dtype=torch.int32, pin_memory=True).copy_(
                status, non_blocking=True
            )
            values = result.loss_and_norm
            values_on_host = torch.empty(len(values), pin_memory=True).copy_(values, non_blocking=True)
            for tensor in (result.loss, result.finite, result.grad_norm):
                if tensor is not None:
                    tensor.record_stream(stream)
            arrived = torch.cuda.Event()
            arrived.record(stream)
        return _PendingStatus(step, status_on_host, values_on_host, arrived)

    def _pop_ready(self, keep: int) -> list[StepStatus]:
        statuses = []
        while len(self._pending) > keep:
            statuses.append(_read_status(self._pending.popleft()))
        return statuses


@waiting_for(STEP_STATUS)
def _read_status(pending: _PendingStatus) -> StepStatus:
    if isinstance(pending.work, torch.cuda.Event):
        pending.work.synchronize()
    elif pending.work is not None:
        pending.work.wait()
    loss, *norm = pending.loss_and_norm.tolist()
    return unpack(pending.step, pending.status.tolist(), loss, norm[0] if norm else None)
