"""Collectives along one axis, by the backend or by point-to-point messages (gloo, NCCL), in fp32 or a shorter dtype."""

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch import distributed as dist

from podscale.pytorch.all_reduce.plan import (
    MessagePlan,
    Receive,
    Round,
    Span,
    chain_broadcast,
    chain_reduce,
    equal_spans,
    ring_all_gather,
    ring_reduce_scatter,
)
from podscale.pytorch.mesh import Axis

# torch >= 2.13 deprecates the older names.
reduce_scatter_tensor: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather_tensor: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class AxisCollectives(Protocol):
    """Collectives along one axis, in place, in a flat fp32 `buffer` [elements].

    `parts` has one span of the buffer for each position.
    """

    axis: Axis

    def reduce_scatter(self, buffer: Tensor, parts: list[Span]) -> None:
        """Sum `parts[position]` of the `buffer` over the axis. Overwrites the other parts."""
        ...

    def all_gather(self, buffer: Tensor, parts: list[Span]) -> None:
        """Copy every part of the `buffer` from its position."""
        ...

    def all_reduce(self, buffer: Tensor) -> None:
        """Sum the `buffer` over the axis."""
        ...

    def reduce(self, buffer: Tensor) -> None:
        """Sum the `buffer` into position 0. Overwrites the buffers of other positions."""
        ...

    def broadcast(self, buffer: Tensor) -> None:
        """Copy the `buffer` of position 0."""
        ...


def build_collectives(axis: Axis, wire: torch.dtype, device: torch.device) -> AxisCollectives:
    """Build the collectives of an axis: NCCL's own on GPUs; on CPUs ours, whose order of additions is known."""
    if axis.size == 1:
        return NoCollectives(axis)
    return BackendCollectives(axis, wire) if device.type == "cuda" else P2PCollectives(axis, wire, device)


class NoCollectives(AxisCollectives):
    """Collectives of an axis with one rank: nothing is sent, so nothing is rounded."""

    def __init__(self, axis: Axis) -> None:
        assert axis.size == 1
        self.axis = axis

    def reduce_scatter(self, buffer: Tensor, parts: list[Span]) -> None:
        pass

    def all_reduce(self, buffer: Tensor) -> None:
        pass

    all_gather = reduce_scatter
    reduce = broadcast = all_reduce


class BackendCollectives(AxisCollectives):
    """The backend's own collectives, used on NCCL, which knows the links between the GPUs."""

    def __init__(self, axis: Axis, wire: torch.dtype) -> None:
        assert list(axis.ranks) == sorted(axis.ranks), axis.ranks
        self.axis, self._wire = axis, wire

    def reduce_scatter(self, buffer: Tensor, parts: list[Span]) -> None:
        start, stop = parts[self.axis.position]
        packed = _pack(buffer, parts, self._wire, _longest(parts))
        reduced = packed.new_empty(len(packed) // len(parts))
        reduce_scatter_tensor(reduced, packed, group=self.axis.group)
        buffer[start:stop].copy_(reduced[: stop - start])

    def all_gather(self, buffer: Tensor, parts: list[Span]) -> None:
        local = _pack(buffer, [parts[self.axis.position]], self._wire, _longest(parts))
        packed = local.new_empty(len(local) * len(parts))
        all_gather_tensor(packed, local, group=self.axis.group)
        _unpack(packed, buffer, parts)

    def all_reduce(self, buffer: Tensor) -> None:
        self._run(dist.all_reduce, buffer)

    def reduce(self, buffer: Tensor) -> None:
        self._run(partial(dist.reduce, dst=self.axis.ranks[0]), buffer)

    def broadcast(self, buffer: Tensor) -> None:
        self._run(partial(dist.broadcast, src=self.axis.ranks[0]), buffer)

    def _run(self, collective: Callable[..., object], buffer: Tensor) -> None:
        sent = buffer.to(self._wire)
        collective(sent, group=self.axis.group)
        if sent.dtype != buffer.dtype:
            buffer.copy_(sent)


def _pack(buffer: Tensor, parts: list[Span], wire: torch.dtype, length: int) -> Tensor:
    """Return the parts one after the other, `length` each, in the wire dtype; the buffer's memory if possible."""
    grid = _grid(buffer, parts)
    if grid is not None and grid.shape[1] == length:
        return grid.to(wire).reshape(-1)
    packed = buffer.new_zeros(length * len(parts), dtype=wire)
    for index, (start, stop) in enumerate(parts):
        packed[index * length : index * length + stop - start].copy_(buffer[start:stop])
    return packed


def _unpack(packed: Tensor, buffer: Tensor, parts: list[Span]) -> None:
    """Copy packed parts back into the buffer: the inverse of `_pack`."""
    grid, length = _grid(buffer, parts), _longest(parts)
    if grid is not None:
        grid.copy_(packed.view(grid.shape))
        return
    for index, (start, stop) in enumerate(parts):
        buffer[start:stop].copy_(packed[index * length : index * length + stop - start])


def _grid(buffer: Tensor, parts: list[Span]) -> Tensor | None:
    """Return the parts as rows of one view if they have equal lengths and distances, else None."""
    length, start = _longest(parts), parts[0][0]
    stride = parts[1][0] - start if len(parts) > 1 else length
    if parts == [(start + index * stride, start + index * stride + length) for index in range(len(parts))]:
        return buffer.as_strided((len(parts), length), (stride, 1), buffer.storage_offset() + start)
    return None


def _longest(parts: list[Span]) -> int:
    return max(stop - start for start, stop in parts)


SEGMENT_ELEMENTS = {"cpu": 2**18, "cuda": 2**20}
"""Length of a message by device, elements (1 and 4 MiB of fp32): short for overlap, long for the cost of a call."""


class P2PCollectives(AxisCollectives):
    """Collectives by rings and chains of point-to-point messages, pipelined in segments."""

    def __init__(self, axis: Axis, wire: torch.dtype, device: torch.device) -> None:
        self.axis = axis
        self._transport = build_transport(axis, wire, device)
        self._segment = SEGMENT_ELEMENTS[device.type]

    def reduce_scatter(self, buffer: Tensor, parts: list[Span]) -> None:
        self._transport.run(ring_reduce_scatter(self.axis.position, tuple(parts), self._segment), buffer)

    def all_gather(self, buffer: Tensor, parts: list[Span]) -> None:
        self._transport.run(ring_all_gather(self.axis.position, tuple(parts), self._segment), buffer)

    def all_reduce(self, buffer: Tensor) -> None:
        parts = equal_spans(len(buffer), self.axis.size)
        self.reduce_scatter(buffer, parts)
        self.all_gather(buffer, parts)

    def reduce(self, buffer: Tensor) -> None:
        self._transport.run(chain_reduce(self.axis.position, self.axis.size, len(buffer), self._segment), buffer)

    def broadcast(self, buffer: Tensor) -> None:
        self._transport.run(chain_broadcast(self.axis.position, self.axis.size, len(buffer), self._segment), buffer)


class P2PTransport(Protocol):
    """Transport of the messages of a plan between the ranks of an axis."""

    def run(self, plan: MessagePlan, buffer: Tensor) -> None:
        """Run `plan` over the fp32 `buffer`. Sent elements are rounded in it too, so all ranks end with equal bits."""
        ...


def build_transport(axis: Axis, wire: torch.dtype, device: torch.device) -> P2PTransport:
    return NcclTransport(axis, wire, device) if device.type == "cuda" else GlooTransport(axis, wire)


RECEIVES_AHEAD = 8
"""Number of receives posted, and of rounds that sends may run ahead: gloo sends only when its peer has posted."""
MAX_UNSENT = 64
"""Number of unfinished sends before the oldest is waited for, which bounds the memory of casts.

It is several times the number of sends in RECEIVES_AHEAD rounds: else all ranks could wait for each other's receives.
"""


class GlooTransport(P2PTransport):
    """Messages between CPU tensors. A rank waits only for the message that it needs next."""

    def __init__(self, axis: Axis, wire: torch.dtype) -> None:
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
        if longest and (not self._scratch or len(self._scratch[0]) < longest):
            self._scratch = [torch.empty(longest, dtype=self._wire) for _ in range(RECEIVES_AHEAD)]

    def _post_receives(self, receives: Iterator[Receive], buffer: Tensor) -> None:
        """Post receives until RECEIVES_AHEAD of them wait for their message."""
        while len(self._posted) < RECEIVES_AHEAD and (receive := next(receives, None)) is not None:
            target = buffer[receive.start : receive.stop]
            if receive.adds or target.dtype != self._wire:
                self._scratch.append(self._scratch.pop(0))
                target = self._scratch[-1][: len(target)]
            self._posted.append((self._group.recv([target], self._peers[receive.peer], 0), target))

    def _send(self, current: Round, buffer: Tensor) -> None:
        for peer, start, stop in current.sends:
            values = _round_to_wire(buffer[start:stop], self._wire)
            self._unsent.append((self._group.send([values], self._peers[peer], 0), values))
            if len(self._unsent) > MAX_UNSENT:
                self._unsent.popleft()[0].wait()

    def _receive(self, receive: Receive, buffer: Tensor) -> None:
        work, values = self._posted.popleft()
        work.wait()
        if receive.adds:
            buffer[receive.start : receive.stop].add_(values)
        elif values.dtype != buffer.dtype:
            buffer[receive.start : receive.stop].copy_(values)


class NcclTransport(P2PTransport):
    """Messages between GPU tensors. NCCL pairs sends with receives, so each round is one batch."""

    def __init__(self, axis: Axis, wire: torch.dtype, device: torch.device) -> None:
        self._axis, self._wire = axis, wire
        # The first call on a group must include all of its ranks; a round of a tree may not.
        dist.all_reduce(torch.zeros(1, device=device), group=axis.group)

    def run(self, plan: MessagePlan, buffer: Tensor) -> None:
        for current in plan.rounds:
            operations, received = [], []
            for peer, start, stop in current.sends:
                values = _round_to_wire(buffer[start:stop], self._wire)
                operations.append(dist.P2POp(dist.isend, values, self._axis.ranks[peer], self._axis.group))
            for peer, start, stop, adds in current.receives:
                values = torch.empty(stop - start, dtype=self._wire, device=buffer.device)
                operations.append(dist.P2POp(dist.irecv, values, self._axis.ranks[peer], self._axis.group))
                received.append((buffer[start:stop], values, adds))
            if operations:
                for work in dist.batch_isend_irecv(operations):
                    work.wait()
            for target, values, adds in received:
                _ = target.add_(values) if adds else target.copy_(values)


def _round_to_wire(values: Tensor, wire: torch.dtype) -> Tensor:
    """Return the values in the wire dtype, and replace them by what is sent."""
    if values.dtype == wire:
        return values
    rounded = values.to(wire)
    values.copy_(rounded)
    return rounded
