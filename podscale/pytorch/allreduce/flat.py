"""The backend's own all-reduce over all ranks."""

import torch
from torch import Tensor

from podscale.pytorch.allreduce.collectives import BackendCollectives, all_gather_tensor
from podscale.pytorch.allreduce.order import equal_spans
from podscale.pytorch.mesh import Axis
from podscale.pytorch.world import World


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
