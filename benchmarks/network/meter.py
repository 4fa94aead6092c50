"""Timing of collectives in a lab, with what they sent over the links and how busy the machine was."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import distributed as dist

from benchmarks.network.lab import Lab
from podscale.pytorch.world import World


@dataclass(frozen=True)
class Sample:
    """Times and traffic of some rounds.

    seconds: of each round, from the common start until the last rank was done.
    node_bytes, rank_bytes: sent by one node and by one rank over its link in one round, on average.
    busy: share of the machine's cores in use.
    """

    seconds: tuple[float, ...]
    node_bytes: float
    rank_bytes: float
    busy: float

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


class Busy:
    """Counter of the machine's busy cores from its making on."""

    def __init__(self) -> None:
        self._total, self._idle = _ticks()

    def share(self) -> float:
        """Share of all cores in use since then."""
        total, idle = _ticks()
        return 1 - (idle - self._idle) / max(total - self._total, 1)


def measure(world: World, lab: Lab, operation: Callable[[], object], rounds: int) -> Sample:
    """Time `operation` on all ranks at once, `rounds` times; every rank gets the times, rank 0 the traffic too."""
    before, busy = _traffic(world, lab), Busy()
    seconds = tuple(_round(operation) for _ in range(rounds))
    share, after = busy.share(), _traffic(world, lab)
    node, rank = (late - early for early, late in zip(before, after, strict=True))
    return Sample(seconds, node / rounds / lab.shape.nodes, rank / rounds / lab.shape.size, share)


def _round(operation: Callable[[], object]) -> float:
    dist.barrier()
    begin = time.perf_counter()
    operation()
    elapsed = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
    dist.all_reduce(elapsed, dist.ReduceOp.MAX)
    return float(elapsed)


def _traffic(world: World, lab: Lab) -> tuple[int, int]:
    """Bytes sent over the nodes' and over the ranks' links so far."""
    dist.barrier()
    found = (lab.node_bytes(), lab.rank_bytes()) if world.is_rank0 else (0, 0)
    dist.barrier()
    return found


def _ticks() -> tuple[int, int]:
    """The machine's clock ticks so far: of all cores, and idle ones."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return sum(ticks), ticks[3] + ticks[4]
