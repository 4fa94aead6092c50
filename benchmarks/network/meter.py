"""Timing of collectives in a lab, with what they sent over the links and how busy the machine was."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import distributed as dist

from benchmarks.network.lab import Lab
from podscale.pytorch.world import World


@dataclass(frozen=True)
class Sample:
    """seconds: of each round, from the common start until the last rank was done. node_bytes, rank_bytes: sent by one
    node and by one rank over its link in one round, on average. busy: share of the machine's cores in use.
    """

    seconds: tuple[float, ...]
    node_bytes: float
    rank_bytes: float
    busy: float

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def measure(world: World, lab: Lab, operation: Callable[[], object], rounds: int) -> Sample:
    """Runs `operation` on all ranks at once, `rounds` times; every rank gets the times, rank 0 the rest too."""
    before = _counters(world, lab)
    seconds = tuple(_round(operation) for _ in range(rounds))
    after = _counters(world, lab)
    node, rank, total, idle = (late - early for early, late in zip(before, after, strict=True))
    shape = lab.shape
    return Sample(seconds, node / rounds / shape.nodes, rank / rounds / shape.size, 1 - idle / max(total, 1))


def _round(operation: Callable[[], object]) -> float:
    dist.barrier()
    begin = time.perf_counter()
    operation()
    elapsed = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
    dist.all_reduce(elapsed, dist.ReduceOp.MAX)
    return float(elapsed)


def _counters(world: World, lab: Lab) -> Sequence[int]:
    """Bytes over node and rank links, and the machine's ticks: all and idle ones."""
    dist.barrier()
    if not world.first:
        return 0, 0, 0, 0
    ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return lab.node_bytes(), lab.rank_bytes(), sum(ticks), ticks[3] + ticks[4]
