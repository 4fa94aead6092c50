"""All-reduce by masters (Jia 2018): reduce to one rank of each row, ring among those, broadcast inside the row.

With p ranks in rows of k the paper counts 4 (k - 1) + 2 (p/k - 1) steps, where a ring takes 2 (p - 1): for small
messages, whose time is latency, that is what matters. Ours takes 2 (k - 1) steps in the rows instead of 4 (k - 1),
since segments go along a chain. A master's link carries all of the row's data, so for large messages the torus, whose
links share it, is the better one.

What every all-reduce offers, whole or in its two halves.

The backend's own all-reduce over all ranks.

One ring through all ranks, node after node (Patarasuk 2009: bandwidth-optimal all-reduce).

A reduce-scatter and an all-gather of size - 1 steps each; every link carries 2 (size - 1)/size of the data, which no
all-reduce can do with less. Between nodes run only two of the ring's links, one in and one out of each.

Two binary trees over all ranks, each with half of the data (Sanders 2009; NCCL uses the like since 2.4).

Sums climb to the roots and come down again in a pipeline of segments: the latency grows with log2 of the ranks where
a ring's grows with the ranks, and the error of a sum in low precision likewise. A rank is an inner node of one tree
and a leaf of the other, so that all links carry their share.

By size (Jia 2018): the hierarchy for small buckets, where latency counts, the ring for large ones.

The small tensors are fused into buckets before (the reducer does that). The paper's two thresholds, of fusing and of
choosing, are not known to us: ours are options of the run document.
"""

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from podscale.pytorch.all_reduce.collectives import (
    SEGMENT_ELEMENTS,
    BackendCollectives,
    P2PCollectives,
    all_gather_tensor,
    build_collectives,
    build_transport,
)
from podscale.pytorch.all_reduce.plan import Span, double_tree, equal_spans
from podscale.pytorch.comm_queue import build_slice_queue, run_pipelined, slice_count
from podscale.pytorch.mesh import Axis, Mesh
from podscale.pytorch.world import World

WIRE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Formats of messages by their names in a run document."""


class AllReduce(Protocol):
    """Averages flat fp32 buckets over all ranks, on the calling thread and its current stream.

    Any length of at least one element; the order of additions depends on the length and the ranks alone. Contributions
    are divided by the number of ranks before they are added: in half precision a sum can overflow where no mean does.
    """

    def __call__(self, bucket: Tensor) -> None:
        """Replaces the bucket by its mean over all ranks: the same bits on each."""
        ...


@runtime_checkable
class ShardedAllReduce(AllReduce, Protocol):
    """One that can stop half way, where each rank holds the mean of its own shard.

    So an optimizer can update that shard alone and gather weights instead of gradients (Kumar 2019, section 3). The
    length of a bucket must then be a multiple of `shards`. Ranks with the same `shard` hold the same bits of it.
    """

    shards: int
    """Parts a bucket is scattered into."""
    shard: int
    """The part of this rank."""

    def reduce_scatter(self, bucket: Tensor) -> Tensor:
        """This rank's shard of the mean, a new fp32 tensor; the bucket is used up."""
        ...

    def all_gather(self, shard: Tensor, out: Tensor) -> None:
        """Fills `out` with every rank's shard, in order; any dtype, moved as it is whatever the wire."""
        ...


class FlatAllReduce:
    """One collective over the whole world; the shards of its halves are the ranks'."""

    def __init__(self, world: World, wire: torch.dtype = torch.float32) -> None:
        self.shards, self.shard = world.size, world.rank
        axis = Axis("line", tuple(range(world.size)), world.rank, world.consecutive_group(world.size))
        self._group, self._line = axis.group, BackendCollectives(axis, wire)

    def reduce_scatter(self, bucket: Tensor) -> Tensor:
        parts = equal_spans(len(bucket), self.shards)
        self._line.reduce_scatter(bucket.mul_(1.0 / self.shards), parts)
        start, stop = parts[self.shard]
        return bucket[start:stop].clone()

    def all_gather(self, shard: Tensor, out: Tensor) -> None:
        all_gather_tensor(out, shard, group=self._group)

    def __call__(self, bucket: Tensor) -> None:
        self._line.all_reduce(bucket.mul_(1.0 / self.shards))


class RingAllReduce:
    """The ring along an axis with all ranks on it; the shards of its halves are the ranks'."""

    def __init__(self, line: Axis, device: torch.device, wire: torch.dtype = torch.float32) -> None:
        self._ranks = [line.group_rank(place) for place in range(line.size)]
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
        """The part of each place: that of its rank, which on the line may be another number."""
        shards = equal_spans(len(bucket), self.shards)
        parts = [shards[rank] for rank in self._ranks]
        self._ring.reduce_scatter(bucket.mul_(1.0 / self.shards), parts)
        return parts


class DoubleTreeAllReduce:
    """The double tree along an axis with all ranks on it."""

    def __init__(self, line: Axis, device: torch.device, wire: torch.dtype = torch.float32) -> None:
        self._line = line
        self._transport = build_transport(line, wire, device)
        self._segment = SEGMENT_ELEMENTS[device.type]

    def __call__(self, bucket: Tensor) -> None:
        plan = double_tree(self._line.position, self._line.size, len(bucket), self._segment)
        self._transport.run(plan, bucket.mul_(1.0 / self._line.size))


class HierarchicalAllReduce:
    """The master of a row is its place 0."""

    def __init__(
        self,
        mesh: Mesh,
        device: torch.device,
        wire_row: torch.dtype = torch.float32,
        wire_column: torch.dtype = torch.float32,
    ) -> None:
        self._mesh, self._is_master = mesh, mesh.row.position == 0
        self._ranks = mesh.row.size * mesh.column.size
        self._row = build_collectives(mesh.row, wire_row, device)
        self._column = build_collectives(mesh.column, wire_column, device)
        self._slice_queue = build_slice_queue(device)

    def __call__(self, bucket: Tensor) -> None:
        bucket.mul_(1.0 / self._ranks)
        cuts = equal_spans(len(bucket), slice_count(len(bucket), self._mesh.shape, bucket.device.type))
        slices = [bucket[start:stop] for start, stop in cuts]

        def across(number: int) -> None:
            if self._is_master:
                self._column.all_reduce(slices[number])

        run_pipelined(
            self._slice_queue,
            len(slices),
            lambda number: self._row.reduce(slices[number]),
            across,
            lambda number: self._row.broadcast(slices[number]),
        )


class HybridAllReduce:
    """`small` for buckets below `threshold` bytes of fp32, `large` for the others."""

    def __init__(self, small: AllReduce, large: AllReduce, threshold: int) -> None:
        self._small, self._large, self._threshold = small, large, threshold

    def __call__(self, bucket: Tensor) -> None:
        assert bucket.dtype == torch.float32
        (self._small if bucket.nbytes < self._threshold else self._large)(bucket)
