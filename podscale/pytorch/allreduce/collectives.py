"""What can be done along one axis: by the backend's own collectives, or by our messages."""

from typing import Any, Protocol

import torch
from torch import Tensor
from torch import distributed as dist

from podscale.pytorch.allreduce.messages import build_transport
from podscale.pytorch.allreduce.order import Span, equal_spans
from podscale.pytorch.allreduce.plan import chain_broadcast, chain_reduce, ring_all_gather, ring_reduce_scatter
from podscale.pytorch.mesh import Axis

SEGMENT_ELEMENTS = {"cpu": 2**18, "cuda": 2**20}
"""Elements of a message, by device (1 and 4 MiB of fp32): small enough to overlap, large enough to pay for a call."""

# The names of torch >= 2.13, which deprecates the older ones.
reduce_scatter_tensor: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather_tensor: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class AxisCollectives(Protocol):
    """Sums along one axis, in place, in flat fp32 buffers. `parts` are one span of the buffer a place."""

    axis: Axis

    def reduce_scatter(self, buffer: Tensor, parts: list[Span]) -> None:
        """parts[place] becomes the sum; the other parts are used up."""
        ...

    def all_gather(self, buffer: Tensor, parts: list[Span]) -> None:
        """Every part becomes that of its place."""
        ...

    def all_reduce(self, buffer: Tensor) -> None:
        """The buffer becomes the sum."""
        ...

    def reduce(self, buffer: Tensor) -> None:
        """The buffer of place 0 becomes the sum; the others' are used up."""
        ...

    def broadcast(self, buffer: Tensor) -> None:
        """The buffer becomes that of place 0."""
        ...


class P2PCollectives:
    """Rings and chains of messages, cut into segments that follow each other without a gap."""

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


class BackendCollectives:
    """The backend's own: on NCCL the choice for an axis, since it knows the wires between the GPUs."""

    def __init__(self, axis: Axis, wire: torch.dtype) -> None:
        assert list(axis.ranks) == sorted(axis.ranks), axis.ranks
        self.axis, self._wire = axis, wire

    def reduce_scatter(self, buffer: Tensor, parts: list[Span]) -> None:
        start, stop = parts[self.axis.position]
        whole = _pack(buffer, parts, self._wire, _share(parts))
        mine = whole.new_empty(len(whole) // len(parts))
        reduce_scatter_tensor(mine, whole, group=self.axis.group)
        buffer[start:stop].copy_(mine[: stop - start])

    def all_gather(self, buffer: Tensor, parts: list[Span]) -> None:
        start, stop = parts[self.axis.position]
        mine = _pack(buffer, [(start, stop)], self._wire, _share(parts))
        whole = mine.new_empty(len(mine) * len(parts))
        all_gather_tensor(whole, mine, group=self.axis.group)
        _unpack(whole, buffer, parts)

    def all_reduce(self, buffer: Tensor) -> None:
        sent = buffer.to(self._wire)
        dist.all_reduce(sent, group=self.axis.group)
        _copy_back(buffer, sent)

    def reduce(self, buffer: Tensor) -> None:
        sent = buffer.to(self._wire)
        dist.reduce(sent, self.axis.ranks[0], group=self.axis.group)
        _copy_back(buffer, sent)

    def broadcast(self, buffer: Tensor) -> None:
        sent = buffer.to(self._wire)
        dist.broadcast(sent, self.axis.ranks[0], group=self.axis.group)
        _copy_back(buffer, sent)


def _pack(buffer: Tensor, parts: list[Span], wire: torch.dtype, share: int) -> Tensor:
    """The parts one after the other, `share` long, in the wire's format; the buffer's own memory if it is like that."""
    grid = _grid(buffer, parts)
    if grid is not None and grid.shape[1] == share:
        return grid.to(wire).reshape(-1)
    packed = buffer.new_zeros(share * len(parts), dtype=wire)
    for place, (start, stop) in enumerate(parts):
        packed[place * share : place * share + stop - start].copy_(buffer[start:stop])
    return packed


def _unpack(packed: Tensor, buffer: Tensor, parts: list[Span]) -> None:
    """The reverse of `_packed`."""
    grid, share = _grid(buffer, parts), _share(parts)
    if grid is not None:
        grid.copy_(packed.view(grid.shape))
        return
    for place, (start, stop) in enumerate(parts):
        buffer[start:stop].copy_(packed[place * share : place * share + stop - start])


def _grid(buffer: Tensor, parts: list[Span]) -> Tensor | None:
    """The parts as the rows of one view, where they are equally long and equally far apart."""
    share, start = _share(parts), parts[0][0]
    stride = parts[1][0] - start if len(parts) > 1 else share
    if parts == [(start + place * stride, start + place * stride + share) for place in range(len(parts))]:
        return buffer.as_strided((len(parts), share), (stride, 1), buffer.storage_offset() + start)
    return None


def _share(parts: list[Span]) -> int:
    return max(stop - start for start, stop in parts)


def _copy_back(buffer: Tensor, sent: Tensor) -> None:
    if sent.dtype != buffer.dtype:
        buffer.copy_(sent)


class NoCollectives:
    """An axis of one rank, whose sums are its own values: nothing is sent, so nothing is rounded."""

    def __init__(self, axis: Axis) -> None:
        assert axis.size == 1
        self.axis = axis

    def reduce_scatter(self, buffer: Tensor, parts: list[Span]) -> None:
        pass

    def all_gather(self, buffer: Tensor, parts: list[Span]) -> None:
        pass

    def all_reduce(self, buffer: Tensor) -> None:
        pass

    def reduce(self, buffer: Tensor) -> None:
        pass

    def broadcast(self, buffer: Tensor) -> None:
        pass


def build_collectives(axis: Axis, wire: torch.dtype, device: torch.device) -> AxisCollectives:
    """The better of the two: NCCL's own on GPUs; on CPUs ours, whose order of additions is known."""
    if axis.size == 1:
        return NoCollectives(axis)
    return BackendCollectives(axis, wire) if device.type == "cuda" else P2PCollectives(axis, wire, device)
