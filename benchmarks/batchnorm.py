"""Batch norm over groups and parts against torch's local batch norm: time of forward and backward.

    OMP_NUM_THREADS=1 python benchmarks/batchnorm.py [--rounds 7] [--ranks 1 2] [--batch 16]

Images are those of ResNet-50's stages, channels last: fp32 on CPUs, where each rank is a gloo process of one thread,
bf16 on GPUs. All ranks run every variant at the same time. A round runs every variant once, so that a busy moment of
the machine meets all; ratios to torch's local batch norm are taken within each round. `plain` is the textbook form
that the engine had before: sums and sums of squares by elementwise operations in fp32.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from conditions import RESULTS, head, publish
from torch import Tensor, nn
from torch import distributed as dist
from world import run_world

from podscale.config.batch_norm_groups import BatchNormGroup
from podscale.pytorch.batch_norm import BatchNorm, assign_batch_norm_groups
from podscale.pytorch.world import World

SHAPES = {"64 x 56 x 56": (64, 56), "256 x 28 x 28": (256, 28), "1024 x 14 x 14": (1024, 14), "2048 x 7 x 7": (2048, 7)}
REPEATS = 3


class Plain(torch.autograd.Function):
    """Group batch norm with nothing fused."""

    @staticmethod
    def forward(ctx: Any, images: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        x = images.float()
        channels, count = x.shape[1], x.new_full((1,), x.numel() / x.shape[1])
        sums = torch.cat([x.sum((0, 2, 3)), (x * x).sum((0, 2, 3)), count])
        dist.all_reduce(sums)
        mean = sums[:channels] / sums[-1]
        invstd = torch.rsqrt((sums[channels:-1] / sums[-1] - mean * mean).clamp_(min=0.0) + 1e-5)
        ctx.save_for_backward(images, weight, mean, invstd, sums[-1])
        scale = weight * invstd
        return (x * spread(scale) + spread(bias - mean * scale)).to(images.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        images, weight, mean, invstd, count = ctx.saved_tensors
        dy = gradients[0].float()
        xhat = (images.float() - spread(mean)) * spread(invstd)
        bias_gradient, weight_gradient = dy.sum((0, 2, 3)), (dy * xhat).sum((0, 2, 3))
        sums = torch.cat([bias_gradient, weight_gradient])
        dist.all_reduce(sums)
        of_dy, of_xhat = (sums / count).chunk(2)
        dx = (dy - spread(of_dy) - xhat * spread(of_xhat)) * spread(weight * invstd)
        return dx.to(images.dtype), weight_gradient, bias_gradient


def spread(values: Tensor) -> Tensor:
    return values.view(1, -1, 1, 1)


def variants(world: World, channels: int, batch: int) -> dict[str, Callable[[Tensor], Tensor]]:
    """What is compared, by name; torch's own first."""
    local, whole = nn.BatchNorm2d(channels).to(world.device), BatchNorm(channels).to(world.device)
    group, parts = BatchNorm(channels).to(world.device), BatchNorm(channels).to(world.device)
    group.group = world.consecutive_group(world.size)
    assign_batch_norm_groups(parts, world, BatchNormGroup(1, batch // 4))
    ranks = "1 rank, as a group" if world.size == 1 else f"{world.size} ranks"
    return {
        "torch, local": local,
        "span = a rank's batch": whole,
        "span = a quarter of it": parts,
        f"span = {ranks}": group,
        f"plain, {ranks}": lambda x: Plain.apply(x, local.weight, local.bias),
    }


def measure(world: World, rounds: int, batch: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of forward and backward of each round, by shape and variant, on one rank."""
    found: dict[str, dict[str, list[float]]] = {}
    dtype = torch.bfloat16 if world.on_gpu else torch.float32
    for shape, (channels, side) in SHAPES.items():
        x = torch.randn(batch, channels, side, side, dtype=dtype, device=world.device)
        x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
        dy = torch.randn_like(x)
        layers = variants(world, channels, batch)
        found[shape] = {name: [] for name in layers}
        for number in range(rounds + 1):
            for name, layer in layers.items():
                world.barrier()
                seconds = time_of(layer, x, dy, world)
                if number:
                    found[shape][name].append(seconds)
    return found


def time_of(layer: Callable[[Tensor], Tensor], x: Tensor, dy: Tensor, world: World) -> float:
    """Seconds of one forward and backward, over a few in a row."""
    begin = time.perf_counter()
    for _ in range(REPEATS):
        x.grad = None
        layer(x).backward(dy)
    if world.on_gpu:
        torch.cuda.synchronize(world.device)
    return (time.perf_counter() - begin) / REPEATS


def table(found: dict[str, dict[str, list[float]]]) -> list[str]:
    """One row a variant, one column a shape: median ms, and in brackets the median ratio to torch's local one."""
    lines = [f"| variant | {' | '.join(found)} |", "|---|" + "---:|" * len(found)]
    for name in next(iter(found.values())):
        cells = []
        for times in found.values():
            ratios = [own / base for own, base in zip(times[name], times["torch, local"], strict=True)]
            cells.append(f"{statistics.median(times[name]) * 1e3:.2f} ({statistics.median(ratios):.2f})")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gpus = torch.cuda.device_count()
    ranks = [1, gpus] if gpus > 1 else [1] if gpus else [1, 2]
    parser.add_argument("--ranks", type=int, nargs="+", default=ranks)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batch", type=int, default=128 if gpus else 16, help="images of one rank")
    parser.add_argument("--results", type=Path, default=RESULTS / ("batchnorm-gpu.md" if gpus else "batchnorm.md"))
    options = parser.parse_args()
    lines = head("Distributed batch norm", ["torch", "numpy"])
    device = torch.cuda.get_device_name() if gpus else "CPU, one thread a process"
    lines.append(
        f"{device}. Milliseconds of forward and backward of {options.batch} images a rank, in brackets the ratio to "
        "torch's local batch norm."
    )
    for ranks in options.ranks:
        found = run_world(ranks, measure, options.rounds, options.batch)[0]
        lines += ["", f"## {ranks} {'process' if ranks == 1 else 'processes'}", "", *table(found)]
    publish(options.results, lines)


if __name__ == "__main__":
    main()
