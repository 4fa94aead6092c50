"""Collectives along one axis, by the backend or by point-to-point messages (gloo, NCCL), in any wire format."""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch import distributed as dist

from podscale.pytorch.all_reduce.plan import (
    Span,
    chain_broadcast,
    chain_reduce,
    equal_spans,
    ring_all_gather,
    ring_reduce_scatter,
)
from podscale.pytorch.all_reduce.transports import build_transport
from podscale.pytorch.all_reduce.wire_formats import CastFormat, WireFormat
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


def build_collectives(axis: Axis, wire: WireFormat, device: torch.device) -> AxisCollectives:
    """Build the collectives of an axis: NCCL's own on GPUs; on CPUs ours, whose order of additions is known."""
    if axis.size > 1 and device.type == "cpu" and isinstance(wire, CastFormat):
        return P2PCollectives(axis, wire, device)
    return build_backend_collectives(axis, wire, device)


def build_backend_collectives(axis: Axis, wire: WireFormat, device: torch.device) -> AxisCollectives:
    """Build collectives of the backend. It cannot add int8 with scales, so it exchanges them and each rank adds."""
    if axis.size == 1:
        return NoCollectives(axis)
    if isinstance(wire, CastFormat):
        return BackendCollectives(axis, wire.dtype)
    return AllToAllCollectives(axis, wire, device)


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
        packed = _pack(buffer, parts, self._wire, _longest(parts)).reshape(-1)
        reduced = packed.new_empty(len(packed) // len(parts))
        reduce_scatter_tensor(reduced, packed, group=self.axis.group)
        buffer[start:stop].copy_(reduced[: stop - start])

    def all_gather(self, buffer: Tensor, parts: list[Span]) -> None:
        local = _pack(buffer, [parts[self.axis.position]], self._wire, _longest(parts)).reshape(-1)
        packed = local.new_empty(len(parts), len(local))
        all_gather_tensor(packed.view(-1), local, group=self.axis.group)
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


def _pack(buffer: Tensor, parts: list[Span], dtype: torch.dtype, length: int) -> Tensor:
    """Return a row of `length` elements for each part, padded with zeros; a view of the buffer if possible."""
    grid = _grid(buffer, parts)
    if grid is not None and grid.shape[1] == length:
        return grid.to(dtype)
    packed = buffer.new_zeros(len(parts), length, dtype=dtype)
    for row, (start, stop) in zip(packed, parts, strict=True):
        row[: stop - start].copy_(buffer[start:stop])
    return packed


def _unpack(packed: Tensor, buffer: Tensor, parts: list[Span]) -> None:
    """Copy packed parts back into the buffer: the inverse of `_pack`."""
    grid = _grid(buffer, parts)
    if grid is not None:
        grid.copy_(packed)
        return
    for row, (start, stop) in zip(packed, parts, strict=True):
        buffer[start:stop].copy_(row[: stop - start])


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

    def __init__(self, axis: Axis, wire: WireFormat, device: torch.device) -> None:
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


class AllToAllCollectives(P2PCollectives):
    """Collectives for messages that a backend cannot add: the ranks exchange encoded parts, and each adds its own.

    A contribution is rounded once, and so is a gathered sum, however many ranks there are. A link carries the bytes of
    a ring. `reduce` and `broadcast` go along chains.
    """

    def __init__(self, axis: Axis, wire: WireFormat, device: torch.device) -> None:
        assert list(axis.ranks) == sorted(axis.ranks), axis.ranks
        super().__init__(axis, wire, device)
        self._wire = wire

    def reduce_scatter(self, buffer: Tensor, parts: list[Span]) -> None:
        position, length = self.axis.position, _longest(parts)
        if not length:
            return
        start, stop = parts[position]
        contributions = _pack(buffer, parts, buffer.dtype, length)
        sent = self._wire.encode(contributions)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.axis.group)
        values = self._wire.decode(received, length)
        values[position].copy_(contributions[position])  # this rank's own contribution is not rounded
        buffer[start:stop].copy_(values.sum(0)[: stop - start])

    def all_gather(self, buffer: Tensor, parts: list[Span]) -> None:
        length = _longest(parts)
        if not length:
            return
        sent = self._wire.encode(_pack(buffer, [parts[self.axis.position]], buffer.dtype, length)[0])
        received = sent.new_empty(len(parts), len(sent))
        all_gather_tensor(received.view(-1), sent, group=self.axis.group)
        _unpack(self._wire.decode(received, length), buffer, parts)
