"""Group of a run's ranks, which share one key-value store.

Unlike a framework's own store, it is not lost with rank 0. Ranks use it for heartbeats and to compare configurations.
"""

from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from podscale.distributed.store import LocalStore, Store, StoreClient, StoreError
from podscale.distributed.worker_env import RankEnv
from podscale.errors import InputError
from podscale.util import env

LEAVE_TIMEOUT_SECONDS = 10.0
"""Time that rank 0, which holds the framework's own store, waits for its peers at the end, seconds."""


@dataclass(frozen=True)
class RankGroup:
    """Rank, size and store of a group; `timeout_seconds` limits the waits in the store and in every collective."""

    rank: int
    size: int
    store: Store
    timeout_seconds: float

    @classmethod
    def join(cls, rank_env: RankEnv, timeout_seconds: float) -> "RankGroup":
        """Return the group with the launcher's store, or a local store for a single process; does not wait."""
        if rank_env.world_size == 1:
            return cls(rank_env.rank, 1, LocalStore(), timeout_seconds)
        if not rank_env.store_address:
            raise InputError("is missing", field=env.STORE, hint="Start the ranks by `podscale train`.")
        store = StoreClient(rank_env.store_address, rank_env.store_port, timeout_seconds)
        return cls(rank_env.rank, rank_env.world_size, store, timeout_seconds)

    def store_for_thread(self, timeout_seconds: float) -> Store:
        """Return the store for another thread, with its own timeout in seconds."""
        return self.store.clone(timeout_seconds)

    def leave(self) -> None:
        """Mark this rank as done; rank 0 waits for all others, at most `LEAVE_TIMEOUT_SECONDS`."""
        with suppress(StoreError):  # all work is done by now
            if self.rank:
                self.store.set(f"left/{self.rank}", "")
            else:
                self.store.wait([f"left/{rank}" for rank in range(1, self.size)], LEAVE_TIMEOUT_SECONDS)


class World(Protocol):
    """Processes of a run, as shared code sees them; each engine's own class also knows the devices."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def ranks(self) -> range:
        """Global numbers of this process's devices: its ranks in the sampler, unless devices share images."""
        ...

    @property
    def is_rank0(self) -> bool:
        """True on rank 0, which writes the run's files."""
        ...

    @property
    def device_name(self) -> str:
        """Name of the device, for logs."""
        ...

    def hosts(self) -> tuple[str, ...]:
        """Return the host name of every process. Collective: every process must call it."""
        ...

    def barrier(self) -> None:
        """Return when every process has called it."""
        ...
