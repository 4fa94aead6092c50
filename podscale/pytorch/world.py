"""World of one rank: rank, device and process group, and the torch store through which ranks form a rank group."""

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import HashStore, Store, TCPStore
from torch.distributed import DistStoreError
from torch.distributed.rendezvous import rendezvous

from podscale.distributed.rank_group import RankGroup
from podscale.distributed.store import StoreError, StoreTimeout
from podscale.distributed.waits import BARRIER, waiting_for
from podscale.distributed.worker_env import RankEnv
from podscale.pytorch.gpu_checks import check_one_rank_per_gpu, choose_device
from podscale.util import env

TORCH_PORT_KEY = "torch/port"
"""Store key: port of the torch store that rank 0 serves beside ours."""


@contextmanager
def _translate_store_errors() -> Iterator[None]:
    try:
        yield
    except DistStoreError as error:
        raise StoreTimeout(str(error)) from error
    except RuntimeError as error:
        raise StoreError(str(error)) from error


class TorchStore:
    """torch store behind the `Store` protocol; torch's process groups use `store` itself."""

    def __init__(self, store: Store) -> None:
        self.store = store

    @_translate_store_errors()
    def set(self, key: str, value: str) -> None:
        self.store.set(key, value)

    @_translate_store_errors()
    def get(self, keys: Sequence[str]) -> list[str]:
        return [value.decode() for value in self.store.multi_get(list(keys))]

    @_translate_store_errors()
    def wait(self, keys: Sequence[str], seconds: float) -> None:
        self.store.wait(list(keys), timedelta(seconds=seconds))

    @_translate_store_errors()
    def has(self, key: str) -> bool:
        return self.store.check([key])

    @_translate_store_errors()
    def add(self, key: str, amount: int) -> int:
        return self.store.add(key, amount)

    @_translate_store_errors()
    def clone(self, timeout_seconds: float) -> "TorchStore":
        """Open another connection: a waiting call blocks all users of a connection."""
        store = self.store.clone()
        store.set_timeout(timedelta(seconds=timeout_seconds))
        return TorchStore(store)


def join_torch_rank_group(timeout_seconds: float, environ: Mapping[str, str] = os.environ) -> RankGroup:
    """Join the rank group of our launcher or of torchrun, by environment; a group of one if there is neither.

    Both run the store in the launcher of the first pod, so it outlives rank 0.
    """
    if env.STORE in environ:
        return RankGroup.join(RankEnv.read(environ), timeout_seconds)
    rank_env = RankEnv.read(environ)
    rank, size = rank_env.rank, rank_env.world_size
    if size == 1:
        return RankGroup(rank, size, TorchStore(HashStore()), timeout_seconds)
    assert env.MASTER_ADDR in environ, "a world of several ranks is started by the fork launcher or by torchrun"
    timeout = timedelta(seconds=timeout_seconds)
    store, rank, size = next(rendezvous("env://", rank, size, timeout=timeout))
    store.set_timeout(timeout)
    return RankGroup(rank, size, TorchStore(store), timeout_seconds)


def torch_store(rank_group: RankGroup, environ: Mapping[str, str] = os.environ) -> Store:
    """Return a torch store for process groups: the rank group's, or one that rank 0 serves. Every rank calls it."""
    if isinstance(rank_group.store, TorchStore):
        return rank_group.store.store
    address, timeout = RankEnv.read(environ).store_address, timedelta(seconds=rank_group.timeout_seconds)
    if rank_group.rank == 0:
        server = TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        rank_group.store.set(TORCH_PORT_KEY, str(server.port))
        return server
    return TCPStore(address, int(rank_group.store.get([TORCH_PORT_KEY])[0]), is_master=False, timeout=timeout)


NCCL_GRACE_SECONDS = 30.0
"""Extra timeout of NCCL's watchdog, seconds: it aborts without an error text, so our heartbeat must time out first."""


@dataclass(frozen=True)
class World:
    """One rank of a run: `rank` is global, `local_rank` is within the node with index `node`."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    node: int = 0
    timeout_seconds: float = 300.0
    """Timeout of a collective, seconds."""

    @property
    def is_rank0(self) -> bool:
        """True on rank 0, which writes the run's files."""
        return self.rank == 0

    @property
    def ranks(self) -> range:
        """Ranks of the sample order that this process computes."""
        return range(self.rank, self.rank + 1)

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def device_name(self) -> str:
        """Name of the device for logs: the GPU's, or "cpu"."""
        return torch.cuda.get_device_name(self.device) if self.on_gpu else "cpu"

    @waiting_for(BARRIER)
    def nodes(self) -> tuple[int, ...]:
        """Return the node index of every rank. Every rank must call this at the same time."""
        nodes = torch.zeros(self.size, dtype=torch.int64, device=self.device)
        nodes[self.rank] = self.node
        dist.all_reduce(nodes)
        return tuple(nodes.tolist())

    @waiting_for(BARRIER)
    def hosts(self) -> tuple[str, ...]:
        """Return the host name of every rank. Every rank must call this at the same time."""
        names = [""] * self.size
        dist.all_gather_object(names, socket.gethostname())
        return tuple(names)

    def consecutive_group(self, ranks: int) -> dist.ProcessGroup:
        """Return this rank's group of `ranks` consecutive ranks. Every rank must call this, in the same order."""
        assert self.size % ranks == 0, (self.size, ranks)
        return self.build_group([list(range(start, start + ranks)) for start in range(0, self.size, ranks)])

    @waiting_for(BARRIER)
    def build_group(self, partition: list[list[int]]) -> dist.ProcessGroup:
        """Form every group of the partition, as torch requires of every rank, and return the one with this rank.

        On GPUs the groups are NCCL only: gloo would open a connection between every two ranks of every group.
        """
        backend = "nccl" if self.on_gpu else None
        timeout = timedelta(seconds=self.timeout_seconds)  # torch's default is 30 minutes
        groups = [dist.new_group(ranks, timeout=timeout, backend=backend) for ranks in partition]
        group = next(group for group, ranks in zip(groups, partition, strict=True) if self.rank in ranks)
        assert isinstance(group, dist.ProcessGroup)
        return group

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value on every rank, pickled. Every rank must call this at the same time."""
        values = [value]
        dist.broadcast_object_list(values, src=0, device=torch.device("cpu"))
        return values[0]

    @waiting_for(BARRIER)
    def barrier(self) -> None:
        """Return when every rank has called it."""
        dist.all_reduce(torch.zeros(1, device=self.device))
        if self.on_gpu:
            torch.cuda.synchronize(self.device)


def world_of_one(device: torch.device) -> World:
    """Return a world of one rank, without a process group."""
    return World(rank=0, size=1, local_rank=0, local_size=1, device=device)


def join_world(
    timeout_seconds: float, environ: Mapping[str, str] = os.environ, rank_group: RankGroup | None = None
) -> World:
    """Join the process group of our launcher's or torchrun's environment; a world of one without it.

    NCCL between GPUs, gloo between CPUs (and for small host messages in both cases). `timeout_seconds` limits forming
    the group and every collective. A `rank_group` that was joined before is used.
    """
    rank_env = RankEnv.read(environ)
    rank_group = rank_group or join_torch_rank_group(timeout_seconds, environ)
    device = choose_device(environ)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timeout_seconds + (NCCL_GRACE_SECONDS if device.type == "cuda" else 0.0)
    dist.init_process_group(
        backend,
        store=torch_store(rank_group, environ),
        rank=rank_group.rank,
        world_size=rank_group.size,
        timeout=timedelta(seconds=timeout),
    )
    if device.type == "cuda" and rank_group.size > 1:
        check_one_rank_per_gpu(device, environ)
    local_rank, local_size = rank_env.local_rank, rank_env.local_world_size
    return World(rank_group.rank, rank_group.size, local_rank, local_size, device, rank_env.node, timeout)


def current_world(device: torch.device, timeout_seconds: float) -> World:
    """Return the world of a default process group that the caller formed; the timeout is for groups formed later.

    The caller's launcher may set none of torchrun's variables, or only some of them.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    local_size = env.read_number(env.LOCAL_WORLD_SIZE) or size
    node, local_rank = env.read_number(env.GROUP_RANK), env.read_number(env.LOCAL_RANK)
    node = rank // local_size if node is None else node
    local_rank = rank % local_size if local_rank is None else local_rank
    return World(rank, size, local_rank, local_size, device, node, timeout_seconds)


def leave_world(rank_group: RankGroup | None = None) -> None:
    """Leave the process group, if one was joined, and the rank group."""
    if dist.is_initialized():
        with suppress(RuntimeError):  # a peer that left first has closed the connection, which is harmless
            dist.destroy_process_group()
    if rank_group is not None:
        rank_group.leave()
