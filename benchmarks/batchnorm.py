"""Time of batch norm over a group and over a part of a batch, against torch's local batch norm.

    OMP_NUM_THREADS=1 python -m benchmarks.batchnorm [--rounds 7] [--ranks 1 2] [--batch 16]

Images are those of ResNet-50's stages, channels last: fp32 on CPUs, where each rank is a gloo process of one thread,
bf16 on GPUs. All ranks run every variant at the same time. A round runs every variant once, and ratios are taken within
a round, so that other load affects all alike. `plain` is the textbook form: sums and sums of squares by elementwise
operations in fp32.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from benchmarks.conditions import head
from benchmarks.harness import Options, write_results
from benchmarks.measure import median_ratio
from benchmarks.world import run_world
from podscale.config.ranks import BatchNormGroup
from podscale.pytorch.batch_norm import BatchNorm, assign_batch_norm_groups
from podscale.pytorch.world import World

STAGES = ((64, 56), (256, 28), (1024, 14), (2048, 7))
"""Channels, and side in pixels, of each stage."""
SMALL_STAGES = ((8, 6), (16, 3))
REPEATS = 3


class PlainGroupNorm(torch.autograd.Function):
    """Group batch norm without fused operations."""

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
        return (x * per_channel(scale) + per_channel(bias - mean * scale)).to(images.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        images, weight, mean, invstd, count = ctx.saved_tensors
        dy = gradients[0].float()
        xhat = (images.float() - per_channel(mean)) * per_channel(invstd)
        bias_gradient, weight_gradient = dy.sum((0, 2, 3)), (dy * xhat).sum((0, 2, 3))
        sums = torch.cat([bias_gradient, weight_gradient])
        dist.all_reduce(sums)
        of_dy, of_xhat = (sums / count).chunk(2)
        dx = (dy - per_channel(of_dy) - xhat * per_channel(of_xhat)) * per_channel(weight * invstd)
        return dx.to(images.dtype), weight_gradient, bias_gradient


def per_channel(values: Tensor) -> Tensor:
    return values.view(1, -1, 1, 1)


def variants(world: World, channels: int, batch: int) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return the layers to compare, by name."""
    local, batch_norm = nn.BatchNorm2d(channels).to(world.device), BatchNorm(channels).to(world.device)
    group, parts = BatchNorm(channels).to(world.device), BatchNorm(channels).to(world.device)
    group.group = world.consecutive_group(world.size)
    assign_batch_norm_groups(parts, world, BatchNormGroup(1, batch // 4))
    ranks = "1 rank, as a group" if world.size == 1 else f"{world.size} ranks"
    return {
        "torch, local": local,
        "span = a rank's batch": batch_norm,
        "span = a quarter of it": parts,
        f"span = {ranks}": group,
        f"plain, {ranks}": lambda x: PlainGroupNorm.apply(x, local.weight, local.bias),
    }


def measure(
    world: World, stages: tuple[tuple[int, int], ...], rounds: int, batch: int
) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of forward and backward of each round, by shape and variant, on this rank."""
    times: dict[str, dict[str, list[float]]] = {}
    dtype = torch.bfloat16 if world.on_gpu else torch.float32
    for channels, side in stages:
        shape = f"{channels} x {side} x {side}"
        x = torch.randn(batch, channels, side, side, dtype=dtype, device=world.device)
        x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
        dy = torch.randn_like(x)
        layers = variants(world, channels, batch)
        times[shape] = {name: [] for name in layers}
        for number in range(rounds + 1):
            for name, layer in layers.items():
                world.barrier()
                seconds = step_seconds(layer, x, dy, world)
                if number:
                    times[shape][name].append(seconds)
    return times


def step_seconds(layer: Callable[[Tensor], Tensor], x: Tensor, dy: Tensor, world: World) -> float:
    """Return the mean seconds of a few forward and backward passes in a row."""
    start = time.perf_counter()
    for _ in range(REPEATS):
        x.grad = None
        layer(x).backward(dy)
    if world.on_gpu:
        torch.cuda.synchronize(world.device)
    return (time.perf_counter() - start) / REPEATS


def table(times: dict[str, dict[str, list[float]]]) -> list[str]:
    """Return a table of variants by shapes: median ms, in brackets the median ratio to torch's local batch norm."""
    lines = [f"| variant | {' | '.join(times)} |", "|---|" + "---:|" * len(times)]
    for name in next(iter(times.values())):
        cells = []
        for by_variant in times.values():
            ratio = median_ratio(by_variant[name], by_variant["torch, local"])
            cells.append(f"{statistics.median(by_variant[name]) * 1e3:.2f} ({ratio:.2f})")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = Options(__doc__)
    gpus = torch.cuda.device_count()
    ranks = [1, gpus] if gpus > 1 else [1] if gpus else [1, 2]
    parser.add_size("--ranks", full=ranks, small=[2], type=int, nargs="+", help="processes")
    parser.add_size("--rounds", full=7, small=1, type=int)
    parser.add_size("--batch", full=128 if gpus else 16, small=4, type=int, help="images of one rank")
    options = parser.read()
    if options.batch < 4:
        parser.error(f"--batch: too small to normalise a quarter of it (got {options.batch}). Give at least 4.")
    lines = head("Distributed batch norm", ["torch", "numpy"])
    device = torch.cuda.get_device_name() if gpus else "CPU, one thread a process"
    lines.append(
        f"{device}. Milliseconds of forward and backward of {options.batch} images a rank; in brackets the ratio to "
        "torch's local batch norm. Span: images behind one set of statistics. Plain: the textbook form, sums and sums "
        "of squares by elementwise operations in fp32."
    )
    stages = SMALL_STAGES if options.small else STAGES
    for size in options.ranks:
        times = run_world(size, measure, stages, options.rounds, options.batch)[0]
        lines += ["", f"## {size} {'process' if size == 1 else 'processes'}", "", *table(times)]
    write_results(options.results, "batchnorm-gpu.md" if gpus else "batchnorm.md", lines)


if __name__ == "__main__":
    main()
