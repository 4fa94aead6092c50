"""How the ranks of a run find each other before anything is built: one small key-value store that all of them reach."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from torch._C._distributed_c10d import HashStore, Store
from torch.distributed.rendezvous import rendezvous


@dataclass(frozen=True)
class Meeting:
    """One rank's place among `size` ranks, and their store.

    Under torchrun the store lives in the launcher of the first node and so outlives rank 0. `timeout_seconds` is the
    longest that a rank waits for the others, here and in every collective later.
    """

    rank: int
    size: int
    store: Store
    timeout_seconds: float

    def own_store(self, seconds: float) -> Store:
        """A connection of its own, for another thread; its operations give up after `seconds`."""
        store = self.store.clone()
        store.set_timeout(timedelta(seconds=seconds))
        return store


def meet(timeout_seconds: float, environment: Mapping[str, str] = os.environ) -> Meeting:
    """Reaches the store that torchrun's variables name; a store of its own where there are none."""
    rank, size = int(environment.get("RANK", "0")), int(environment.get("WORLD_SIZE", "1"))
    if size == 1:
        return Meeting(rank, size, HashStore(), timeout_seconds)
    assert "MASTER_ADDR" in environment, "a world of several ranks is started by torchrun"
    timeout = timedelta(seconds=timeout_seconds)
    store, rank, size = next(rendezvous("env://", rank, size, timeout=timeout))
    store.set_timeout(timeout)
    return Meeting(rank, size, store, timeout_seconds)
