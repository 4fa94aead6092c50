"""Spatial partitioning: the devices of a group share an image, each with a tile of it (Kumar 2019).

For batches so large that there are fewer images than cores, or images too large for one core. Each device keeps a
tile of every activation; weights stay whole on each.

tiles: how an image is cut, and what an operation's outputs need of their neighbours' tiles. halo: the exchange of
that, for convolutions and pooling. pooling: max pool, global average, gathering. sides: how large the images of each
operation of a network are.

Gradients need no word of their own: after the global average, or the gathering, every device of a group computes the
same loss, and what it differentiates is the sum of these; the mean of gradients over all devices, which is what an
all-reduce makes, is then the gradient of the mean loss over the images.
"""

from podscale.jax.spatial.halo import exchange_halo
from podscale.jax.spatial.pooling import gather_tiles, global_average_pool, max_pool
from podscale.jax.spatial.sides import TilesOf, no_tiles, track_tiles
from podscale.jax.spatial.tiles import Parts, Tiles

__all__ = [
    "Parts",
    "Tiles",
    "TilesOf",
    "exchange_halo",
    "gather_tiles",
    "global_average_pool",
    "max_pool",
    "no_tiles",
    "track_tiles",
]
