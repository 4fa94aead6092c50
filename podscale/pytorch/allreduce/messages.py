"""Carries out plans by point-to-point messages, on gloo or NCCL, in fp32 or a shorter wire format."""

from collections import deque
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor
from torch import distributed as dist

from podscale.pytorch.allreduce.plan import MessagePlan, Receive, Round
from podscale.pytorch.mesh import Axis

RECEIVES_AHEAD = 8
"""Messages announced before they are needed, since gloo sends only what its peer has said it will take; and rounds
that sends may run ahead of receives."""
MAX_UNSENT = 64
"""Messages under way before the oldest is waited for, which bounds the memory of casts. Several times what AHEAD
rounds can send: else all places might wait for each other to take a message."""


class P2PTransport(Protocol):
    """Runs a place's plan over an fp32 buffer. What was sent is what stays: in a shorter wire format the sent
    elements are replaced by their rounded values, so that in the end every place holds the same bits."""

    def run(self, plan: MessagePlan, buffer: Tensor) -> None: ...


class GlooTransport:
    """Messages between CPU tensors, each at its own pace: a place waits only for what it needs next."""

    def __init__(self, axis: Axis, wire: torch.dtype) -> None:
        self._group, self._wire = axis.group, wire
        self._peers = [axis.group_rank(place) for place in range(axis.size)]
        self._scratch: list[Tensor] = []
        self._posted: deque[tuple[dist.Work, Tensor]] = deque()
        self._unsent: deque[tuple[dist.Work, Tensor]] = deque()

    def run(self, plan: MessagePlan, buffer: Tensor) -> None:
        rounds, sent, lead = plan.rounds, 0, min(plan.slack, RECEIVES_AHEAD)
        expected = (receive for one in rounds for receive in one.receives)
        self._allocate_scratch(plan)
        self._post_receives(expected, buffer)  # first, or the word of it would wait behind the data of the first sends
        for number, current in enumerate(rounds):
            for following in rounds[sent : number + lead + 1]:
                self._send(following, buffer)
            sent = number + lead + 1
            for receive in current.receives:
                self._post_receives(expected, buffer)
                self._receive(receive, buffer)
        while self._unsent:
            self._unsent.popleft()[0].wait()

    def _send(self, one: Round, buffer: Tensor) -> None:
        for peer, start, stop in one.sends:
            values = buffer[start:stop]
            if values.dtype != self._wire:
                exact, values = values, values.to(self._wire)
                exact.copy_(values)
            self._unsent.append((self._group.send([values], self._peers[peer], 0), values))
            if len(self._unsent) > MAX_UNSENT:
                self._unsent.popleft()[0].wait()

    def _post_receives(self, expected: Iterator[Receive], buffer: Tensor) -> None:
        """Posts receives until AHEAD of them wait for their message."""
        while len(self._posted) < RECEIVES_AHEAD and (receive := next(expected, None)) is not None:
            place = buffer[receive.start : receive.stop]
            if receive.adds or place.dtype != self._wire:
                self._scratch.append(self._scratch.pop(0))
                place = self._scratch[-1][: len(place)]
            self._posted.append((self._group.recv([place], self._peers[receive.peer], 0), place))

    def _receive(self, receive: Receive, buffer: Tensor) -> None:
        work, values = self._posted.popleft()
        work.wait()
        if receive.adds:
            buffer[receive.start : receive.stop].add_(values)
        elif values.dtype != buffer.dtype:
            buffer[receive.start : receive.stop].copy_(values)

    def _allocate_scratch(self, plan: MessagePlan) -> None:
        """Scratch for every posted receive, kept from run to run: fresh pages would cost more than the adding."""
        longest = max((r.stop - r.start for one in plan.rounds for r in one.receives), default=0)
        if longest and (not self._scratch or len(self._scratch[0]) < longest):
            self._scratch = [torch.empty(longest, dtype=self._wire) for _ in range(RECEIVES_AHEAD)]


class NcclTransport:
    """Messages between GPU tensors: NCCL pairs sends with receives, so each round goes out as one batch."""

    def __init__(self, axis: Axis, wire: torch.dtype, device: torch.device) -> None:
        self._axis, self._wire = axis, wire
        # The first call on a group must have all of its ranks, which a round of a tree need not.
        dist.all_reduce(torch.zeros(1, device=device), group=axis.group)

    def run(self, plan: MessagePlan, buffer: Tensor) -> None:
        for one in plan.rounds:
            operations, arrived = [], []
            for peer, start, stop in one.sends:
                values = buffer[start:stop]
                if values.dtype != self._wire:
                    exact, values = values, values.to(self._wire)
                    exact.copy_(values)
                operations.append(dist.P2POp(dist.isend, values, self._axis.ranks[peer], self._axis.group))
            for receive in one.receives:
                values = torch.empty(receive.stop - receive.start, dtype=self._wire, device=buffer.device)
                operations.append(dist.P2POp(dist.irecv, values, self._axis.ranks[receive.peer], self._axis.group))
                arrived.append((receive, values))
            if operations:
                for work in dist.batch_isend_irecv(operations):
                    work.wait()
            for receive, values in arrived:
                place = buffer[receive.start : receive.stop]
                _ = place.add_(values) if receive.adds else place.copy_(values)


def build_transport(axis: Axis, wire: torch.dtype, device: torch.device) -> P2PTransport:
    """The messenger of a device."""
    return NcclTransport(axis, wire, device) if device.type == "cuda" else GlooTransport(axis, wire)
