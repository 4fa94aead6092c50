"""The backend's own all-reduce over all ranks."""

from torch import Tensor
from torch import distributed as dist

from podscale.pytorch.allreduce.base import all_gather_tensor, reduce_scatter_tensor
from podscale.pytorch.world import World


class Flat:
    """One collective over the whole world; the shards of its halves are the ranks'."""

    def __init__(self, world: World) -> None:
        self.shards, self.shard = world.size, world.rank
        self._group = world.consecutive_group(world.size)

    def reduce_scatter(self, bucket: Tensor) -> Tensor:
        shard = bucket.new_empty(len(bucket) // self.shards)
        reduce_scatter_tensor(shard, bucket.mul_(1.0 / self.shards), group=self._group)
        return shard

    def all_gather(self, shard: Tensor, out: Tensor) -> None:
        all_gather_tensor(out, shard, group=self._group)

    def __call__(self, bucket: Tensor) -> None:
        dist.all_reduce(bucket.mul_(1.0 / self.shards), group=self._group)
