"""What every all-reduce offers, whole or in its two halves."""

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

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
