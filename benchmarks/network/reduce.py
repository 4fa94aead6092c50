"""All-reduce over shaped links: every algorithm, buckets of several sizes, and a network's tensors one by one."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.network.lab import Lab
from benchmarks.network.meter import Sample, measure
from benchmarks.network.replay import Replay, Trace, pieces
from podscale.config.train import AllReduceSection
from podscale.pytorch.all_reduce import build_all_reduce
from podscale.pytorch.world import World
from podscale.training.param_layout import plan_buckets

SIZES = (1.0, 8.0, 51.0, 102.2, 243.9)
"""MB of fp32 gradients: ResNet-50's 25,557,032 parameters are 102.2, AlexNet's 60,967,112 are 243.9."""
ROUNDS = {1.0: 10, 8.0: 3, 51.0: 1, 102.2: 1, 243.9: 1}
HYBRID_UP_TO = 51.0
"""Larger ones than hybrid's threshold are its ring's; one of them is enough to see it."""
DDP = "DDP default"

Operations = dict[str, Callable[[], object]]


def sweep(world: World, lab: Lab, sections: dict[str, dict[str, Any]], sizes: Sequence[float]) -> dict[str, Any]:
    """{algorithm: {size in MB: Sample}}; every result is checked before it counts. DDP is measured besides."""
    found: dict[str, dict[float, Sample]] = {}
    for name, section in sections.items():
        reduce = build_all_reduce(AllReduceSection(**section), world)
        check(world, reduce, section)
        for size in sizes:
            if name == "hybrid" and size > HYBRID_UP_TO:
                found[name][size] = found["ring"][size]
                continue
            bucket = _bucket(world, size)
            found.setdefault(name, {})[size] = measure(world, lab, lambda r=reduce, b=bucket: r(b), ROUNDS[size])
    for size in sizes:
        found.setdefault(DDP, {})[size] = _ddp(world, lab, pieces(int(size * 1e6)), ROUNDS[size])
    return found


def one_by_one(world: World, lab: Lab, sections: dict[str, dict[str, Any]], trace: Trace) -> dict[str, Sample]:
    """Every tensor of a network in a message of its own, as where nothing fuses them."""
    lengths = [-(-shape.numel() // world.size) * world.size for shape in trace.shapes]
    tensors = [torch.zeros(length) for length in lengths]
    found = {}
    for name, section in sections.items():
        reduce = build_all_reduce(AllReduceSection(**section), world)
        check(world, reduce, section)
        found[name] = measure(world, lab, lambda r=reduce: [r(tensor) for tensor in tensors], 1)
    return found


def in_buckets(
    world: World, lab: Lab, sections: dict[str, dict[str, Any]], trace: Trace, bucket_mb: float
) -> dict[str, Sample]:
    """The same tensors fused into buckets as the reducer lays them out."""
    layout = plan_buckets([shape.numel() for shape in trace.shapes], int(bucket_mb * 2**20) // 4, world.size)
    flat = torch.zeros(layout.length)
    buckets = [flat[start:stop] for start, stop in layout.bounds]
    found = {}
    for name, section in sections.items():
        reduce = build_all_reduce(AllReduceSection(**section), world)
        check(world, reduce, section)
        found[name] = measure(world, lab, lambda r=reduce: [r(bucket) for bucket in buckets], 1)
    return found


def in_turn(world: World, lab: Lab, sections: dict[str, dict[str, Any]], megabytes: float) -> dict[str, Sample]:
    """One bucket with every section."""
    bucket, found = _bucket(world, megabytes), {}
    for name, section in sections.items():
        reduce = build_all_reduce(AllReduceSection(**section), world)
        check(world, reduce, section)
        found[name] = measure(world, lab, lambda r=reduce: r(bucket), 1)
    return found


def check(world: World, reduce: Callable[[Tensor], None], section: dict[str, Any]) -> None:
    """A small bucket, so that connections stand, whose mean is known: rank r brings r, r + 1, r + 2, ..."""
    count = 64 * world.size
    bucket = torch.arange(count, dtype=torch.float32) % 7 + world.rank
    expected = torch.arange(count, dtype=torch.float32) % 7 + (world.size - 1) / 2
    reduce(bucket)
    tolerance = 0.05 if "bf16" in str(section) else 1e-5
    assert torch.allclose(bucket, expected, atol=tolerance), f"{section}: a wrong mean"


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
    assert gradient is not None
    assert torch.allclose(gradient, torch.tensor((world.size - 1) / 2)), "DDP: a wrong mean"
    return sample
