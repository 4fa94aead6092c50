"""XLA's own all-reduce over all devices, which on a TPU goes along all dimensions of the torus."""

from jax import Array, lax
from jax.sharding import Mesh

from podscale.jax.mesh import RANKS


class Flat:
    """One collective over the whole mesh; the shards of its halves are the devices'."""

    axes = RANKS

    def __init__(self, mesh: Mesh) -> None:
        self.shards = mesh.size

    def __call__(self, bucket: Array) -> Array:
        return lax.psum(bucket / self.shards, RANKS)

    def reduce_scatter(self, bucket: Array) -> Array:
        return lax.psum_scatter(bucket / self.shards, RANKS, tiled=True)

    def all_gather(self, shard: Array) -> Array:
        return lax.all_gather(shard, RANKS, tiled=True)
