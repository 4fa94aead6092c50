"""One ring through all ranks, node after node (Patarasuk 2009: bandwidth-optimal all-reduce).

A reduce-scatter and an all-gather of size - 1 steps each; every link carries 2 (size - 1)/size of the data, which no
all-reduce can do with less. Between nodes run only two of the ring's links, one in and one out of each.
"""

import torch
from torch import Tensor

from podscale.pytorch.allreduce.collectives import P2PCollectives, all_gather_tensor
from podscale.pytorch.allreduce.order import Span, equal_spans
from podscale.pytorch.mesh import Axis


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
