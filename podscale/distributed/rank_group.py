"""How the ranks of a run find each other before anything is built: one small key-value store that all of them reach.

Frameworks have stores of their own, which live in rank 0 and end with it. This one names who is missing and outlives
every rank, so it is where ranks agree, where they tell how they are, and where a failure looks for the culprit.

The processes of a run, as far as what both engines share must know of them.
"""

from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from podscale.distributed.store import LocalStore, Store, StoreClient, StoreError
from podscale.distributed.worker_env import RankEnv

LEAVE_TIMEOUT_SECONDS = 10.0
"""How long rank 0, in which the framework's own store lives, stays for the others at the end."""


@dataclass(frozen=True)
class RankGroup:
    """One rank's place among `size` ranks, and their store.

    `timeout_seconds` is the longest that a rank waits for the others, here and in every collective later.
    """

    rank: int
    size: int
    store: Store
    timeout_seconds: float

    def store_for_thread(self, timeout_seconds: float) -> Store:
        """The store for another thread; its operations give up after `seconds`."""
        return self.store.clone(timeout_seconds)


def join_rank_group(rank_env: RankEnv, timeout_seconds: float) -> RankGroup:
    """The meeting of this rank with the others, if there are any, by the spawner's store; nothing is waited for yet."""
    store = (
        StoreClient(rank_env.store_address, rank_env.store_port, timeout_seconds)
        if rank_env.world_size > 1
        else LocalStore()
    )
    return RankGroup(rank_env.rank, rank_env.world_size, store, timeout_seconds)


def leave_rank_group(rank_group: RankGroup) -> None:
    """Lets the others know that this rank is done; rank 0 stays for the last of them."""
    with suppress(StoreError):  # nothing is left to lose
        if rank_group.rank:
            rank_group.store.set(f"left/{rank_group.rank}", "")
        else:
            rank_group.store.wait([f"left/{rank}" for rank in range(1, rank_group.size)], LEAVE_TIMEOUT_SECONDS)


class World(Protocol):
    """One process among `size`; each engine has its own, which knows its devices besides."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def ranks(self) -> range:
        """This process's devices, counted over all: its ranks of the sample order, unless devices share images."""
        ...

    @property
    def is_rank0(self) -> bool:
        """Rank 0: the one that writes."""
        ...

    @property
    def device_name(self) -> str:
        """What this process computes on, for people."""
        ...

    def hosts(self) -> tuple[str, ...]:
        """The machine of every process, by name. Every process must call this at the same time."""
        ...
