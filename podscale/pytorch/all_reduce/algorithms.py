"""All-reduce algorithms: flat, ring, double tree, hierarchical and hybrid (for the torus see `torus2d`).

Ring (Patarasuk 2009, bandwidth-optimal): one ring through all ranks, node after node. A reduce-scatter and an
all-gather of size - 1 steps each; every link carries 2 (size - 1)/size of the data, the minimum of any all-reduce.

Double tree (Sanders 2009; NCCL has a similar one since 2.4): two binary trees over all ranks, each with half of the
data. Sums go up to the roots and down again in a pipeline of segments, so the latency, and the error of a sum in low
precision, grow with log2 of the ranks instead of the ranks. A rank is an inner node of one tree and a leaf of the
other, so all links carry their share.

Hierarchical (Jia 2018): reduce to one master of each row, ring among the masters, broadcast inside the row. With p
ranks in rows of k the paper counts 4 (k - 1) + 2 (p/k - 1) steps instead of a ring's 2 (p - 1), which matters for small
messages, bound by latency. Ours takes 2 (k - 1) steps in the rows instead of 4 (k - 1), since segments are forwarded
along a chain. A master's link carries all data of its row, so the torus is better for large messages.

Hybrid (Jia 2018): hierarchical for small buckets, ring for large ones. Small tensors are fused into buckets by the
reducer. The paper does not state its thresholds for fusing and choosing; ours are options of the run document.
"""

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from podscale.pytorch.all_reduce.collectives import (
    SEGMENT_ELEMENTS,
    P2PCollectives,
    all_gather_tensor,
    build_backend_collectives,
    build_collectives,
)
from podscale.pytorch.all_reduce.plan import Span, double_tree, equal_spans
from podscale.pytorch.all_reduce.transports import build_transport
from podscale.pytorch.all_reduce.wire_formats import FP32, WireFormat
from podscale.pytorch.comm_queue import build_comm_queue, run_pipelined, slice_count
from podscale.pytorch.mesh import Axis, Mesh
from podscale.pytorch.world import World


class AllReduce(Protocol):
    """Average of flat fp32 buckets over all ranks, on the calling thread and its current stream.

    Buckets have one element or more. The order of additions depends only on the length and the ranks. Contributions
    are divided by the number of ranks before they are added: in half precision a sum can overflow when the mean fits.
    """

    def __call__(self, bucket: Tensor) -> None:
        """Replace `bucket`, fp32 [elements], by its mean over all ranks, bit-identical on each."""
        ...


@runtime_checkable
class ShardedAllReduce(AllReduce, Protocol):
    """All-reduce that offers its two halves: reduce-scatter and all-gather.

    An optimizer can then step one shard and gather weights instead of gradients (Kumar 2019; Xu 2020). The length of
    a bucket must be a multiple of `shards`. Ranks with the same `shard` hold the same bits of it.
    """

    shards: int
    shard: int

    def reduce_scatter(self, bucket: Tensor) -> Tensor:
        """Return this rank's shard of the mean as a new fp32 tensor. Overwrites `bucket`, fp32 [elements]."""
        ...

    def all_gather(self, shard: Tensor, out: Tensor) -> None:
        """Fill `out` [shards * len(shard)] with every rank's `shard`, in order and in their dtype."""
        ...


class FlatAllReduce(ShardedAllReduce):
    """The backend's own all-reduce over all ranks, or its all-to-all for int8. It has one shard per rank."""

    def __init__(self, world: World, wire: WireFormat = FP32) -> None:
        self.shards, self.shard = world.size, world.rank
        axis = Axis("line", tuple(range(world.size)), world.rank, world.consecutive_group(world.size))
        self._group, self._line = axis.group, build_backend_collectives(axis, wire, world.device)

    def reduce_scatter(self, bucket: Tensor) -> Tensor:
        parts = equal_spans(len(bucket), self.shards)
        self._line.reduce_scatter(bucket.mul_(1.0 / self.shards), parts)
        start, stop = parts[self.shard]
        return bucket[start:stop].clone()

    def all_gather(self, shard: Tensor, out: Tensor) -> None:
        all_gather_tensor(out, shard, group=self._group)

    def __call__(self, bucket: Tensor) -> None:
        self._line.all_reduce(bucket.mul_(1.0 / self.shards))


class RingAllReduce(ShardedAllReduce):
    """Ring along an axis with all ranks. It has one shard per rank."""

    def __init__(self, line: Axis, device: torch.device, wire: WireFormat = FP32) -> None:
        self._ranks = [line.group_rank(position) for position in range(line.size)]
        self.shards, self.shard = line.size, self._ranks[line.position]
        self._line, self._ring = line, P2PCollectives(line, wire, device)

    def reduce_scatter(self, bucket: Tensor) -> Tensor:
        start, stop = self._reduce_scatter_parts(bucket)[self._line.position]
        return bucket[start:stop].clone()

    def all_gather(self, shard: Tensor, out: Tensor) -> None:
        all_gather_tensor(out, shard, group=self._line.group)

    def __call__(self, bucket: Tensor) -> None:
        self._ring.all_gather(bucket, self._reduce_scatter_parts(bucket))

    def _reduce_scatter_parts(self, bucket: Tensor) -> list[Span]:
        """Reduce-scatter the bucket and return the part of each position, which is its rank's shard."""
        shards = equal_spans(len(bucket), self.shards)
        parts = [shards[rank] for rank in self._ranks]
        self._ring.reduce_scatter(bucket.mul_(1.0 / self.shards), parts)
        return parts


class DoubleTreeAllReduce(AllReduce):
    """Double binary tree along an axis with all ranks."""

    def __init__(self, line: Axis, device: torch.device, wire: WireFormat = FP32) -> None:
        self._line = line
        self._transport = build_transport(line, wire, device)
        self._segment = SEGMENT_ELEMENTS[device.type]

    def __call__(self, bucket: Tensor) -> None:
        plan = double_tree(self._line.position, self._line.size, len(bucket), self._segment)
        self._transport.run(plan, bucket.mul_(1.0 / self._line.size))


class GridAllReduce:
    """Base of the algorithms on a grid: collectives of its axes, and the queue of the columns."""

    def __init__(
        self,
        mesh: Mesh,
        device: torch.device,
        wire_row: WireFormat = FP32,
        wire_column: WireFormat = FP32,
    ) -> None:
        self._mesh = mesh
        self._ranks = mesh.row.size * mesh.column.size
        self._row = build_collectives(mesh.row, wire_row, device)
        self._column = build_collectives(mesh.column, wire_column, device)
        self._column_queue = build_comm_queue(device, "all-reduce-columns")


class HierarchicalAllReduce(GridAllReduce, AllReduce):
    """Hierarchical all-reduce. The master of a row is its position 0."""

    def __call__(self, bucket: Tensor) -> None:
        bucket.mul_(1.0 / self._ranks)
        spans = equal_spans(len(bucket), slice_count(len(bucket), self._mesh.shape, bucket.device.type))
        slices = [bucket[start:stop] for start, stop in spans]

        def across(number: int) -> None:
            if self._mesh.row.position == 0:
                self._column.all_reduce(slices[number])

        run_pipelined(
            self._column_queue,
            len(slices),
            lambda number: self._row.reduce(slices[number]),
            across,
            lambda number: self._row.broadcast(slices[number]),
        )


class HybridAllReduce(AllReduce):
    """`small` for buckets below `threshold` bytes of fp32, `large` for the others."""

    def __init__(self, small: AllReduce, large: AllReduce, threshold: int) -> None:
        self._small, self._large, self._threshold = small, large, threshold

    def __call__(self, bucket: Tensor) -> None:
        assert bucket.dtype == torch.float32
        (self._small if bucket.nbytes < self._threshold else self._large)(bucket)
