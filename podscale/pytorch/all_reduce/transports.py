"""Transports of the messages of a plan, by gloo between CPUs and by NCCL between GPUs."""

from collections import deque
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor
from torch import distributed as dist

from podscale.pytorch.all_reduce.plan import MessagePlan, Receive, Round
from podscale.pytorch.all_reduce.wire_formats import WireFormat
from podscale.pytorch.mesh import Axis


class P2PTransport(Protocol):
    """Transport of the messages of a plan between the ranks of an axis."""

    def run(self, plan: MessagePlan, buffer: Tensor) -> None:
        """Run `plan` over the fp32 `buffer`. Sent elements are rounded in it too, so all ranks end with equal bits."""
        ...


def build_transport(axis: Axis, wire: WireFormat, device: torch.device) -> P2PTransport:
    return NcclTransport(axis, wire, device) if device.type == "cuda" else GlooTransport(axis, wire)


RECEIVES_AHEAD = 8
"""Number of receives posted, and of rounds that sends may run ahead: gloo sends only when its peer has posted."""
MAX_UNSENT = 64
"""Number of unfinished sends before the oldest is waited for, which bounds the memory of casts.

It is several times the number of sends in RECEIVES_AHEAD rounds: else all ranks could wait for each other's receives.
"""


class GlooTransport(P2PTransport):
    """Messages between CPU tensors. A rank waits only for the message that it needs next."""

    def __init__(self, axis: Axis, wire: WireFormat) -> None:
        self._group, self._wire = axis.group, wire
        self._peers = [axis.group_rank(position) for position in range(axis.size)]
        self._scratch: list[Tensor] = []
        self._posted: deque[tuple[dist.Work, Tensor]] = deque()
        self._unsent: deque[tuple[dist.Work, Tensor]] = deque()

    def run(self, plan: MessagePlan, buffer: Tensor) -> None:
        rounds, sent, lead = plan.rounds, 0, min(plan.slack, RECEIVES_AHEAD)
        receives = (receive for current in rounds for receive in current.receives)
        self._allocate_scratch(plan)
        self._post_receives(receives, buffer)  # first, or gloo queues its notice behind the data of the first sends
        for number, current in enumerate(rounds):
            for following in rounds[sent : number + lead + 1]:
                self._send(following, buffer)
            sent = number + lead + 1
            for receive in current.receives:
                self._post_receives(receives, buffer)
                self._receive(receive, buffer)
        while self._unsent:
            self._unsent.popleft()[0].wait()

    def _allocate_scratch(self, plan: MessagePlan) -> None:
        """Allocate scratch for every posted receive, kept between runs: fresh pages cost more than the addition."""
        longest = max((r.stop - r.start for current in plan.rounds for r in current.receives), default=0)
        length = self._wire.message_length(longest)
        if longest and (not self._scratch or len(self._scratch[0]) < length):
            self._scratch = [torch.empty(length, dtype=self._wire.dtype) for _ in range(RECEIVES_AHEAD)]

    def _post_receives(self, receives: Iterator[Receive], buffer: Tensor) -> None:
        """Post receives until RECEIVES_AHEAD of them wait for their message."""
        while len(self._posted) < RECEIVES_AHEAD and (receive := next(receives, None)) is not None:
            target = buffer[receive.start : receive.stop]
            if receive.adds or target.dtype != self._wire.dtype:
                self._scratch.append(self._scratch.pop(0))
                target = self._scratch[-1][: self._wire.message_length(len(target))]
            self._posted.append((self._group.recv([target], self._peers[receive.peer], 0), target))

    def _send(self, current: Round, buffer: Tensor) -> None:
        for peer, start, stop in current.sends:
            message = _encode_and_round(buffer[start:stop], self._wire)
            self._unsent.append((self._group.send([message], self._peers[peer], 0), message))
            if len(self._unsent) > MAX_UNSENT:
                self._unsent.popleft()[0].wait()

    def _receive(self, receive: Receive, buffer: Tensor) -> None:
        work, message = self._posted.popleft()
        work.wait()
        target = buffer[receive.start : receive.stop]
        if receive.adds:
            target.add_(self._wire.decode(message, len(target)))
        elif message.dtype != buffer.dtype:
            target.copy_(self._wire.decode(message, len(target)))


class NcclTransport(P2PTransport):
    """Messages between GPU tensors. NCCL pairs sends with receives, so each round is one batch."""

    def __init__(self, axis: Axis, wire: WireFormat, device: torch.device) -> None:
        self._axis, self._wire = axis, wire
        # The first call on a group must include all of its ranks; a round of a tree may not.
        dist.all_reduce(torch.zeros(1, device=device), group=axis.group)

    def run(self, plan: MessagePlan, buffer: Tensor) -> None:
        for current in plan.rounds:
            operations, received = [], []
            for peer, start, stop in current.sends:
                message = _encode_and_round(buffer[start:stop], self._wire)
                operations.append(dist.P2POp(dist.isend, message, self._axis.ranks[peer], self._axis.group))
            for peer, start, stop, adds in current.receives:
                length = self._wire.message_length(stop - start)
                message = torch.empty(length, dtype=self._wire.dtype, device=buffer.device)
                operations.append(dist.P2POp(dist.irecv, message, self._axis.ranks[peer], self._axis.group))
                received.append((buffer[start:stop], message, adds))
            if operations:
                for work in dist.batch_isend_irecv(operations):
                    work.wait()
            for target, message, adds in received:
                values = self._wire.decode(message, len(target))
                _ = target.add_(values) if adds else target.copy_(values)


def _encode_and_round(values: Tensor, wire: WireFormat) -> Tensor:
    """Return the message of `values`, and replace them by what its receiver decodes."""
    if values.dtype == wire.dtype:
        return values
    message = wire.encode(values)
    values.copy_(wire.decode(message, len(values)))
    return message
