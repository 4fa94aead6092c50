"""The ranks that carry out the same whole update, for a rule that deals out work among them."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor
from torch import distributed as dist

from podscale.pytorch.world import World


class ReplicaGroup(NamedTuple):
    """This rank among them; all_gather: equally long vectors of all ranks, one after the other. Default: alone."""

    rank: int = 0
    size: int = 1
    all_gather: Callable[[Tensor], Tensor] = lambda own: own


def build_replica_group(world: World) -> ReplicaGroup:
    """All ranks of a world."""

    def gather(own: Tensor) -> Tensor:
        gathered = own.new_empty(world.size * len(own))
        dist.all_gather_into_tensor(gathered, own)
        return gathered

    return ReplicaGroup(world.rank, world.size, gather) if world.size > 1 else ReplicaGroup()
