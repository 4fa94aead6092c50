"""XLA's own all-reduce over all devices, which on a TPU goes along all dimensions of the torus."""

from jax import Array
from jax.sharding import Mesh

from podscale.jax.allreduce.collectives import all_gather, all_reduce, reduce_scatter
from podscale.jax.mesh import DEVICES, AxisNames


class FlatAllReduce:
    """One collective over the whole mesh; the shards of its halves are the devices'."""

    axes: AxisNames = DEVICES

    def __init__(self, mesh: Mesh) -> None:
        self.shards = mesh.size

    def __call__(self, bucket: Array) -> Array:
        return all_reduce(bucket / self.shards, DEVICES)

    def reduce_scatter(self, bucket: Array) -> Array:
        return reduce_scatter(bucket / self.shards, DEVICES)

    def all_gather(self, shard: Array) -> Array:
        return all_gather(shard, DEVICES)
