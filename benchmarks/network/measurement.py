"""Ranks in an emulated cluster, and the time, traffic and CPU use of their collectives."""

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import distributed as dist

from benchmarks.network.delay_link import enter_namespace
from benchmarks.network.netns_cluster import NetnsCluster
from benchmarks.world import receive_answers, send_answer, set_rank
from podscale.pytorch import world as worlds
from podscale.pytorch.world import World
from podscale.util.processes import exit_with_parent

PORT = 29500
T = TypeVar("T")


def run_ranks(
    cluster: NetnsCluster,
    body: Callable[..., T],
    *arguments: Any,
    placement: Sequence[int] | None = None,
    seconds: float = 600.0,
) -> list[T]:
    """Return the result of `body(world, *arguments)` of every rank. If one fails, kill all of them.

    Ranks are forked from this process, because importing torch in each takes longer than most measurements.

    Args:
        placement: slot of each rank in the cluster; default: node after node.
        seconds: timeout of an answer.
    """
    torch.set_num_threads(1)  # a forked child must not wait for OpenMP threads that only its parent had
    slots = list(placement or range(cluster.shape.size))
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in slots]
    ranks = [
        context.Process(target=_rank, args=(rank, cluster, slots, pipes[rank][1], body, arguments))
        for rank in range(len(slots))
    ]
    for process in ranks:
        process.start()
    for _, writer in pipes:
        writer.close()  # so that the exit of a process closes its pipe
    try:
        return receive_answers([reader for reader, _ in pipes], seconds)
    finally:
        for process in ranks:
            process.kill()
            process.join()


def _rank(
    rank: int,
    cluster: NetnsCluster,
    slots: list[int],
    answer: Connection,
    body: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    exit_with_parent()
    enter_namespace(cluster.namespaces[slots[rank]])
    local_size = cluster.shape.ranks
    set_rank(rank, cluster.shape.size, rank % local_size, local_size, cluster.addresses[slots[0]], PORT)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    send_answer(answer, lambda: body(worlds.join_world(300.0), *arguments))
    os._exit(0)  # skips the parent's exit handlers, which would remove the cluster


@dataclass(frozen=True)
class Sample:
    """Times and traffic of some rounds.

    Args:
        seconds: time of each round, from the common start until the slowest rank is done.
        node_bytes: mean bytes that a node sends over its link in a round.
        rank_bytes: mean bytes that a rank sends over its link in a round.
        busy: fraction of the machine's cores in use.
    """

    seconds: tuple[float, ...]
    node_bytes: float
    rank_bytes: float
    busy: float

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


class CpuUsage:
    """CPU usage of the machine since this object was created."""

    def __init__(self) -> None:
        self._total, self._idle = _ticks()

    def fraction(self) -> float:
        """Return the fraction of all cores in use."""
        total, idle = _ticks()
        return 1 - (idle - self._idle) / max(total - self._total, 1)


def measure(world: World, cluster: NetnsCluster, operation: Callable[[], object], rounds: int) -> Sample:
    """Time `operation` on all ranks at once, `rounds` times. Only rank 0 measures the traffic."""
    before, usage = _traffic(world, cluster), CpuUsage()
    seconds = tuple(time_slowest(operation) for _ in range(rounds))
    busy, after = usage.fraction(), _traffic(world, cluster)
    node, rank = (late - early for early, late in zip(before, after, strict=True))
    return Sample(seconds, node / rounds / cluster.shape.nodes, rank / rounds / cluster.shape.size, busy)


def time_slowest(operation: Callable[[], object]) -> float:
    """Return the seconds that the slowest rank needs for `operation`, from a common start."""
    dist.barrier()
    start = time.perf_counter()
    operation()
    elapsed = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    dist.all_reduce(elapsed, dist.ReduceOp.MAX)
    return float(elapsed)


def _traffic(world: World, cluster: NetnsCluster) -> tuple[int, int]:
    """Return the bytes sent so far over the links of all nodes, and of all ranks."""
    dist.barrier()
    sent = (cluster.node_bytes(), cluster.rank_bytes()) if world.is_rank0 else (0, 0)
    dist.barrier()
    return sent


def _ticks() -> tuple[int, int]:
    """Return the CPU time of all cores since boot, total and idle, in clock ticks."""
    ticks = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return sum(ticks), ticks[3] + ticks[4]
