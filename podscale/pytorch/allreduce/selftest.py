"""How far an all-reduce is from the exact mean, measured with the real ranks before a training relies on it."""

import torch
from torch import distributed as dist

from podscale.pytorch.allreduce.base import AllReduce
from podscale.pytorch.world import World

SHARED_SIGNAL = 0.05
"""Part of a gradient that all ranks share; the rest, of deviation 1, is each rank's own noise."""


def relative_error(all_reduce: AllReduce, world: World, length: int) -> float:
    """|mean - exact| / |exact| (L2) over a bucket of `length` elements; the exact mean by an fp64 all-reduce.

    The values are like gradients of a large batch, mostly noise that cancels: the case in which the error of a low
    precision sum weighs most. Every rank must call this at the same time and gets the same answer.
    """
    generator = torch.Generator(world.device)
    signal = torch.randn(length, generator=generator.manual_seed(0), device=world.device)
    noise = torch.randn(length, generator=generator.manual_seed(1 + world.rank), device=world.device)
    mean = SHARED_SIGNAL * signal + noise
    exact = mean.double()
    dist.all_reduce(exact)
    exact /= world.size
    all_reduce(mean)
    return float((mean - exact).norm() / exact.norm())
