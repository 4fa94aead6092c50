"""The processes of a run as one of them sees it: who it is, its device, and how it reaches the others."""

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import distributed as dist

from podscale.distributed.rank_group import RankGroup, leave_rank_group
from podscale.distributed.waits import BARRIER, waiting_for
from podscale.pytorch.meeting import join_torch_rank_group, torch_store

NCCL_GRACE_SECONDS = 30.0
"""Longer than everybody else NCCL's watchdog waits: it ends a process without a word, ours (see pulse) with one."""


@dataclass(frozen=True)
class World:
    """One rank of a run; `local_rank` of `local_size` on machine number `node`."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    node: int = 0
    timeout_seconds: float = 300.0
    """The longest wait in a collective."""

    @property
    def is_rank0(self) -> bool:
        """Rank 0: the one that writes."""
        return self.rank == 0

    @property
    def ranks(self) -> range:
        """The ranks of the sample order that this process computes: its own."""
        return range(self.rank, self.rank + 1)

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def device_name(self) -> str:
        """What this rank computes on, for people."""
        return torch.cuda.get_device_name(self.device) if self.on_gpu else "cpu"

    @waiting_for(BARRIER)
    def nodes(self) -> tuple[int, ...]:
        """The node of every rank. Every rank must call this at the same time."""
        nodes = torch.zeros(self.size, dtype=torch.int64, device=self.device)
        nodes[self.rank] = self.node
        dist.all_reduce(nodes)
        return tuple(nodes.tolist())

    @waiting_for(BARRIER)
    def hosts(self) -> tuple[str, ...]:
        """The machine of every rank, by name. Every rank must call this at the same time."""
        names = [""] * self.size
        dist.all_gather_object(names, socket.gethostname())
        return tuple(names)

    def consecutive_group(self, ranks: int) -> dist.ProcessGroup:
        """The group of this rank among runs of `ranks` consecutive ones. Every rank must call this, in one order."""
        assert self.size % ranks == 0, (self.size, ranks)
        return self.build_group([list(range(start, start + ranks)) for start in range(0, self.size, ranks)])

    @waiting_for(BARRIER)
    def build_group(self, partition: list[list[int]]) -> dist.ProcessGroup:
        """Forms every group of the partition, as torch asks of every rank; returns the one with this rank in it.

        On GPUs for GPU tensors alone: gloo would join every two ranks of every group by a connection of their own.
        """
        backend = "nccl" if self.on_gpu else None
        timeout = timedelta(seconds=self.timeout_seconds)  # torch's own default, half an hour, is not the world's
        groups = [dist.new_group(ranks, timeout=timeout, backend=backend) for ranks in partition]
        mine = next(number for number, ranks in enumerate(partition) if self.rank in ranks)
        group = groups[mine]
        assert isinstance(group, dist.ProcessGroup)
        return group

    @waiting_for(BARRIER)
    def barrier(self) -> None:
        """Returns when every rank has come here."""
        dist.all_reduce(torch.zeros(1, device=self.device))
        if self.on_gpu:
            torch.cuda.synchronize(self.device)


def join_world(
    timeout_seconds: float, environ: Mapping[str, str] = os.environ, rank_group: RankGroup | None = None
) -> World:
    """Joins the process group that our spawner's or torchrun's variables describe; alone where there are none.

    NCCL between GPUs, gloo between CPUs (and for small host-side messages in both cases). `timeout_seconds` is the
    longest that a rank waits for its peers, in forming the group and in every collective. rank_group: where the ranks
    have met before; default: they meet now.
    """
    rank_group = rank_group or join_torch_rank_group(timeout_seconds, environ)
    local_rank = int(environ.get("LOCAL_RANK", "0"))
    local_size = int(environ.get("LOCAL_WORLD_SIZE", "1"))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    patience = timeout_seconds + (NCCL_GRACE_SECONDS if device.type == "cuda" else 0.0)
    dist.init_process_group(
        backend,
        store=torch_store(rank_group, environ),
        rank=rank_group.rank,
        world_size=rank_group.size,
        timeout=timedelta(seconds=patience),
    )
    node = int(environ.get("GROUP_RANK", rank_group.rank // local_size))
    return World(rank_group.rank, rank_group.size, local_rank, local_size, device, node, patience)


def current_world(device: torch.device, timeout_seconds: float, environ: Mapping[str, str] = os.environ) -> World:
    """The world of a default process group that someone else formed, with `device` for this rank.

    timeout_seconds: the longest wait in groups that this world forms.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    local_size = int(environ.get("LOCAL_WORLD_SIZE", size))
    node = int(environ.get("GROUP_RANK", rank // local_size))
    local_rank = int(environ.get("LOCAL_RANK", rank % local_size))
    return World(rank, size, local_rank, local_size, device, node, timeout_seconds)


def leave_world(rank_group: RankGroup | None = None) -> None:
    """Leaves the process group, if one was joined, and with it the others of the meeting."""
    if dist.is_initialized():
        with suppress(RuntimeError):  # a peer that left first closes the connection under us; nothing is lost by it
            dist.destroy_process_group()
    if rank_group is not None:
        leave_rank_group(rank_group)
