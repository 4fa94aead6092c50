"""What every all-reduce offers, whole or in its two halves."""

from typing import Any, Protocol

from torch import Tensor
from torch import distributed as dist


class AllReduce(Protocol):
    """Averages flat fp32 buckets over all ranks, on the calling thread and its current stream.

    A bucket's length must be a multiple of `shards`. Between the halves each rank holds the mean of its own shard, so
    an optimizer can update that shard alone and gather weights instead of gradients (Kumar 2019, section 3).
    Contributions are divided by the number of ranks before they are added: in half precision a sum can overflow
    where no mean does.
    """

    shards: int
    """Parts a bucket is scattered into."""
    shard: int
    """The part of this rank."""

    def reduce_scatter(self, bucket: Tensor) -> Tensor:
        """This rank's shard of the mean, a new tensor; the bucket's content is used up."""
        ...

    def all_gather(self, shard: Tensor, out: Tensor) -> None:
        """Fills `out` with every rank's shard, in order."""
        ...

    def __call__(self, bucket: Tensor) -> None:
        """Replaces the bucket by its mean over all ranks."""
        ...


# The names of torch >= 2.13, which deprecates the older ones.
reduce_scatter_tensor: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather_tensor: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
