"""Weak scaling of a replayed training step: the part of the all-reduce that no backward pass hides."""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.network.meter import Busy
from benchmarks.network.replay import Replay, Trace
from podscale.config.train import AllReduceSection
from podscale.pytorch.reducer import build_reducer
from podscale.pytorch.world import World

DDP, ALONE = "DDP default", "no reduction"


class Steps(NamedTuple):
    """Median seconds of a step, from the common start until the slowest rank is done, and of its wait after backward,
    on rank 0; share of the machine's cores in use; whether the means were right.
    """

    step: float
    wait: float
    busy: float
    right: bool


def weak_scaling(world: World, sections: dict[str, dict[str, Any]], trace: Trace, rounds: int) -> dict[str, Steps]:
    """{variant: Steps} of the replayed step, without reduction, with every section, and with DDP's defaults."""
    found = {ALONE: _ours(world, {"algorithm": "flat"}, trace, rounds, reduces=False)}
    for name, section in sections.items():
        found[name] = _ours(world, section, trace, rounds)
    found[DDP] = _ddp(world, trace, rounds)
    return found


def _ours(world: World, section: dict[str, Any], trace: Trace, rounds: int, *, reduces: bool = True) -> Steps:
    """Our reducer, as the training step uses it."""
    network = Replay(trace, float(world.rank))
    reducer = build_reducer(AllReduceSection(**section), network, world)

    def step() -> float:
        reducer.start_step()
        reducer.backward(network(_start()), last=reduces)
        turned = time.perf_counter()
        if reduces:
            reducer.finish()
        return time.perf_counter() - turned

    network.hurry = True
    _times(step, 0.0, 1)  # connections and memory are made
    network.hurry = False
    times = _times(step, trace.update, rounds)
    right = not reduces or _right(world, reducer.buffer.views)
    reducer.close()
    return Steps(*times, right)


def _ddp(world: World, trace: Trace, rounds: int) -> Steps:
    """torch's DistributedDataParallel with its own defaults; its waiting is inside backward."""
    network = Replay(trace, float(world.rank))
    wrapped = DistributedDataParallel(network, init_sync=False)

    def step() -> float:
        wrapped.zero_grad()
        wrapped(_start()).backward()
        return 0.0

    network.hurry = True
    _times(step, 0.0, 2)  # its first two steps lay out the buckets
    network.hurry = False
    times = _times(step, trace.update, rounds)
    return Steps(*times, _right(world, [p.grad for p in network.parameters() if p.grad is not None]))


def _start() -> Tensor:
    return torch.zeros((), requires_grad=True)


def _times(step: Callable[[], float], update: float, rounds: int) -> tuple[float, float, float]:
    """Medians of whole steps and of the waits they return; busy cores."""
    steps, waits, busy = [], [], Busy()
    for _ in range(rounds):
        dist.barrier()
        begin = time.perf_counter()
        waits.append(step())
        time.sleep(update)
        elapsed = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
        dist.all_reduce(elapsed, dist.ReduceOp.MAX)
        steps.append(float(elapsed))
    return statistics.median(steps), statistics.median(waits), busy.share()


def _right(world: World, gradients: list[Tensor]) -> bool:
    mean = torch.tensor((world.size - 1) / 2)
    return all(torch.allclose(gradient, mean, atol=1e-2) for gradient in gradients)
