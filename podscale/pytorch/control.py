"""The control word: how all ranks come to the same decisions without ever waiting for each other.

After every update each rank puts four int32 into one small all-reduce under MAX: whether a stop was requested of it,
whether the update was masked, `milliseconds << 16 | rank` of the time it was busy before waiting, which names the
slowest, and the same milliseconds negated, of which the fastest rank's are the highest. The host reads the word of
`LAG` updates ago, which has long arrived, so the loop never waits for it; since all ranks read the same word at the
same step, all act alike. The loss travels to the host in the same late way.
"""

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor
from torch import distributed as dist

from podscale.pytorch.step import StepResult
from podscale.pytorch.world import World

LAG = 2
"""Updates between sending a word and acting on it."""

_MOST_MILLISECONDS = 2**15 - 1


@dataclass(frozen=True)
class Word:
    """What all ranks agree on about update `step`: the same on each of them."""

    step: int
    stop: bool
    finite: bool
    loss: float
    slowest_rank: int
    slowest_milliseconds: int
    fastest_milliseconds: int
    grad_norm: float | None = None


@dataclass(frozen=True)
class _Pending:
    step: int
    word: Tensor
    figures: Tensor
    work: "dist.Work | torch.cuda.Event | None"


class Control:
    """Sends a word after every update and hands out those that are due. Every rank must send the same steps."""

    def __init__(self, world: World, lag: int = LAG) -> None:
        self._world, self._lag = world, lag
        self._group = world.consecutive_group(world.size)
        self._stream = torch.cuda.Stream(world.device) if world.on_gpu else None
        self._pending: deque[_Pending] = deque()

    def send(self, step: int, result: StepResult, *, busy: float, stop: bool) -> None:
        """Puts the word of update `step` on its way; `busy` in seconds."""
        milliseconds = min(round(busy * 1000), _MOST_MILLISECONDS)
        slow = milliseconds << 16 | self._world.rank
        mine = torch.tensor([int(stop), 0, slow, -milliseconds], dtype=torch.int32)
        if self._stream is None:
            mine[1] = (~result.finite).to(torch.int32)
            work = dist.all_reduce(mine, dist.ReduceOp.MAX, group=self._group, async_op=True)
            self._pending.append(_Pending(step, mine, result.figures, work))
        else:
            self._pending.append(self._send_from_gpu(step, mine, result, self._stream))

    def due(self) -> list[Word]:
        """The words of updates at least `lag` ago that were not handed out yet, oldest first."""
        return self._take(self._lag)

    def drain(self) -> list[Word]:
        """Every word not handed out yet; waits for the newest."""
        return self._take(0)

    def _send_from_gpu(self, step: int, mine: Tensor, result: StepResult, stream: torch.cuda.Stream) -> _Pending:
        device = self._world.device
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            word = mine.pin_memory().to(device, non_blocking=True)
            word[1] = (~result.finite).to(torch.int32)
            dist.all_reduce(word, dist.ReduceOp.MAX, group=self._group)
            on_host = torch.empty(len(mine), dtype=torch.int32, pin_memory=True).copy_(word, non_blocking=True)
            figures = result.figures
            told = torch.empty(len(figures), pin_memory=True).copy_(figures, non_blocking=True)
            for tensor in (result.loss, result.finite, result.grad_norm):
                if tensor is not None:
                    tensor.record_stream(stream)
            arrived = torch.cuda.Event()
            arrived.record(stream)
        return _Pending(step, on_host, told, arrived)

    def _take(self, keep: int) -> list[Word]:
        words = []
        while len(self._pending) > keep:
            words.append(_read(self._pending.popleft()))
        return words


def _read(pending: _Pending) -> Word:
    if isinstance(pending.work, torch.cuda.Event):
        pending.work.synchronize()
    elif pending.work is not None:
        pending.work.wait()
    stop, nonfinite, slowest, fastest = pending.word.tolist()
    slow = {"slowest_rank": slowest & 0xFFFF, "slowest_milliseconds": slowest >> 16, "fastest_milliseconds": -fastest}
    loss, *norm = pending.figures.tolist()
    return Word(pending.step, bool(stop), not nonfinite, loss, **slow, grad_norm=norm[0] if norm else None)
