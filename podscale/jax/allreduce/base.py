"""What every all-reduce offers, whole or in its two halves."""

from typing import Protocol

from jax import Array

from podscale.jax.mesh import AxisNames


class AllReduce(Protocol):
    """Averages flat fp32 buckets over all devices, inside `shard_map` over the mesh, with `check_vma=False`.

    Contributions are divided by the number of devices before they are added. It can stop half way, where each device
    holds the mean of its own shard, so that an update can work on that shard alone and gather weights instead of
    gradients (Kumar 2019, section 3). Devices with the same place on `axes` hold the same shard.
    """

    axes: AxisNames
    """Mesh axes along which a bucket is scattered."""
    shards: int
    """Parts a bucket is scattered into; the length of a bucket that is cut in halves is a multiple of it."""

    def __call__(self, bucket: Array) -> Array:
        """The mean of buckets of any length, the same on each device."""
        ...

    def reduce_scatter(self, bucket: Array) -> Array:
        """This device's shard of the mean."""
        ...

    def all_gather(self, shard: Array) -> Array:
        """Every device's shard, in order; any dtype."""
        ...
