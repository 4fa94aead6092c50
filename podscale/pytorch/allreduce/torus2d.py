"""All-reduce on a grid of ranks: along the rows, then along the columns (Ying 2018, section 3.3).

Each rank reduce-scatters its bucket inside its row, all-reduces its shard along its column and gathers inside the
row again, so a slow link between rows carries 1/row of the data. With rows inside nodes this is what NCCL's users
call hierarchical.
"""

from torch import Tensor
from torch import distributed as dist

from podscale.pytorch.allreduce.base import all_gather_tensor, reduce_scatter_tensor
from podscale.pytorch.world import World


class Torus2D:
    """Rows of `row` consecutive ranks; rank r stands in row r // row, column r % row."""

    def __init__(self, world: World, row: int) -> None:
        self.shards, self.shard = row, world.rank % row
        self._ranks = world.size
        self._row = world.consecutive_group(row)
        self._column = world.column_group(row)

    def reduce_scatter(self, bucket: Tensor) -> Tensor:
        shard = bucket.new_empty(len(bucket) // self.shards)
        reduce_scatter_tensor(shard, bucket.mul_(1.0 / self._ranks), group=self._row)
        dist.all_reduce(shard, group=self._column)
        return shard

    def all_gather(self, shard: Tensor, out: Tensor) -> None:
        all_gather_tensor(out, shard, group=self._row)

    def __call__(self, bucket: Tensor) -> None:
        self.all_gather(self.reduce_scatter(bucket), bucket)
