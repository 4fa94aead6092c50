"""All-reduce over shaped links: every algorithm, buckets of several sizes, and a network's tensors one by one."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.network.lab import Lab
from benchmarks.network.meter import Sample, measure
from benchmarks.network.replay import Replay, Trace, pieces
from podscale.config.train import AllReduceSection
from podscale.pytorch.all_reduce import build_all_reduce
from podscale.pytorch.all_reduce.algorithms import AllReduce
from podscale.pytorch.world import World
from podscale.training.param_layout import plan_buckets

SIZES = (1.0, 8.0, 51.0, 102.2, 243.9)
"""MB of fp32 gradients: ResNet-50's 25,557,032 parameters are 102.2, AlexNet's 60,967,112 are 243.9."""
ROUNDS = {1.0: 10, 8.0: 3, 51.0: 1, 102.2: 1, 243.9: 1}
HYBRID_UP_TO = 51.0
"""Larger ones than hybrid's threshold are its ring's; one of them is enough to see it."""
DDP = "DDP default"

Sections = Mapping[str, dict[str, Any]]


def sweep(world: World, lab: Lab, sections: Sections, sizes: Sequence[float]) -> dict[str, dict[float, Sample]]:
    """{algorithm: {size in MB: Sample}}; every result is checked before it counts. DDP is measured besides."""
    found: dict[str, dict[float, Sample]] = {}
    for name, reduce in checked(world, sections):
        found[name] = {}
        for size in sizes:
            if name == "hybrid" and size > HYBRID_UP_TO:
                found[name][size] = found["ring"][size]
                continue
            found[name][size] = measure(world, lab, partial(reduce, _bucket(world, size)), ROUNDS.get(size, 1))
    found[DDP] = {size: _ddp(world, lab, pieces(int(size * 1e6)), ROUNDS.get(size, 1)) for size in sizes}
    return found


def one_by_one(world: World, lab: Lab, sections: Sections, trace: Trace) -> dict[str, Sample]:
    """Every tensor of a network in a message of its own, as if nothing fused them."""
    lengths = [-(-shape.numel() // world.size) * world.size for shape in trace.shapes]
    return _each(world, lab, sections, [torch.zeros(length) for length in lengths])


def in_buckets(world: World, lab: Lab, sections: Sections, trace: Trace, bucket_mb: float) -> dict[str, Sample]:
    """The same tensors fused into buckets as the reducer lays them out."""
    layout = plan_buckets([shape.numel() for shape in trace.shapes], int(bucket_mb * 2**20) // 4, world.size)
    flat = torch.zeros(layout.length)
    return _each(world, lab, sections, [flat[start:stop] for start, stop in layout.bounds])


def in_turn(world: World, lab: Lab, sections: Sections, megabytes: float) -> dict[str, Sample]:
    """One bucket with every section."""
    return _each(world, lab, sections, [_bucket(world, megabytes)])


def _each(world: World, lab: Lab, sections: Sections, tensors: Sequence[Tensor]) -> dict[str, Sample]:
    """All tensors, one after the other, with every section."""
    found = {}
    for name, reduce in checked(world, sections):
        found[name] = measure(world, lab, partial(_reduce_all, reduce, tensors), 1)
    return found


def _reduce_all(reduce: AllReduce, tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        reduce(tensor)


def checked(world: World, sections: Sections) -> Iterator[tuple[str, AllReduce]]:
    """Every section's collective by name, after a check of its result."""
    for name, section in sections.items():
        reduce = build_all_reduce(AllReduceSection(**section), world)
        check(world, reduce, section)
        yield name, reduce


def check(world: World, reduce: AllReduce, section: dict[str, Any]) -> None:
    """A small bucket, so that connections stand, whose mean is known: rank r brings r, r + 1, r + 2, ..."""
    count = 64 * world.size
    bucket = torch.arange(count, dtype=torch.float32) % 7 + world.rank
    expected = torch.arange(count, dtype=torch.float32) % 7 + (world.size - 1) / 2
    reduce(bucket)
    tolerance = 0.05 if "bf16" in str(section) else 1e-5
    if not torch.allclose(bucket, expected, atol=tolerance):
        raise RuntimeError(f"{section}: a wrong mean")


def _bucket(world: World, megabytes: float) -> Tensor:
    unit = 64 * world.size
    return torch.full((int(megabytes * 1e6 / 4) // unit * unit,), float(world.rank))


def _ddp(world: World, lab: Lab, trace: Trace, rounds: int) -> Sample:
    """DDP with its own defaults: buckets of 25 MiB, the first of 1 MiB. Its first backward lays them out anew."""
    network = DistributedDataParallel(Replay(trace, float(world.rank)), init_sync=False)
    start = torch.zeros((), requires_grad=True)

    def step() -> None:
        network.zero_grad()
        network(start).backward()

    step()
    sample = measure(world, lab, step, rounds)
    gradient = next(network.parameters()).grad
    if gradient is None or not torch.allclose(gradient, torch.tensor((world.size - 1) / 2)):
        raise RuntimeError("DDP: a wrong mean")
    return sample
