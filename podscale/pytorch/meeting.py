"""The store by which PyTorch's ranks meet before there is a process group: our spawner's, or torchrun's."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta

from torch._C._distributed_c10d import HashStore, Store, TCPStore
from torch.distributed import DistStoreError
from torch.distributed.rendezvous import rendezvous

from podscale.distributed.rank_group import RankGroup, join_rank_group
from podscale.distributed.store import StoreError, StoreTimeout
from podscale.distributed.worker_env import read_rank_env
from podscale.util import env

TORCH_PORT_KEY = "torch/port"
"""Key: where rank 0 keeps torch's store, beside ours."""


class TorchStore:
    """A store of torch as the engine's `Store`; `store` is torch's own, for its process groups."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def set(self, key: str, value: str) -> None:
        with _translate_store_errors():
            self.store.set(key, value)

    def get(self, keys: Sequence[str]) -> list[str]:
        with _translate_store_errors():
            return [value.decode() for value in self.store.multi_get(list(keys))]

    def wait(self, keys: Sequence[str], seconds: float) -> None:
        with _translate_store_errors():
            self.store.wait(list(keys), timedelta(seconds=seconds))

    def has(self, key: str) -> bool:
        with _translate_store_errors():
            return self.store.check([key])

    def add(self, key: str, amount: int) -> int:
        with _translate_store_errors():
            return self.store.add(key, amount)

    def clone(self, timeout_seconds: float) -> "TorchStore":
        """A connection of its own: one that waits holds up all who share it."""
        with _translate_store_errors():
            store = self.store.clone()
            store.set_timeout(timedelta(seconds=timeout_seconds))
            return TorchStore(store)


@contextmanager
def _translate_store_errors() -> Iterator[None]:
    try:
        yield
    except DistStoreError as error:
        raise StoreTimeout(str(error)) from error
    except RuntimeError as error:
        raise StoreError(str(error)) from error


def join_torch_rank_group(timeout_seconds: float, environ: Mapping[str, str] = os.environ) -> RankGroup:
    """Reaches the store of our spawner, or the one that torchrun's variables name; alone where there is neither.

    Both live in the launcher of the first pod and so outlive rank 0.
    """
    if env.STORE in environ:
        return join_rank_group(read_rank_env(environ), timeout_seconds)
    rank, size = int(environ.get("RANK", "0")), int(environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return RankGroup(rank, size, TorchStore(HashStore()), timeout_seconds)
    assert "MASTER_ADDR" in environ, "a world of several ranks is started by our spawner or by torchrun"
    timeout = timedelta(seconds=timeout_seconds)
    store, rank, size = next(rendezvous("env://", rank, size, timeout=timeout))
    store.set_timeout(timeout)
    return RankGroup(rank, size, TorchStore(store), timeout_seconds)


def torch_store(rank_group: RankGroup, environ: Mapping[str, str] = os.environ) -> Store:
    """torch's own store, which its process groups need: the meeting's, or one that rank 0 keeps while it lives.

    Every rank must call this at the same time.
    """
    if isinstance(rank_group.store, TorchStore):
        return rank_group.store.store
    address, timeout = read_rank_env(environ).store_address, timedelta(seconds=rank_group.timeout_seconds)
    if rank_group.rank == 0:
        kept = TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        rank_group.store.set(TORCH_PORT_KEY, str(kept.port))
        return kept
    return TCPStore(address, int(rank_group.store.get([TORCH_PORT_KEY])[0]), is_master=False, timeout=timeout)
