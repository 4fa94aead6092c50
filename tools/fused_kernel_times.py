"""Times and bandwidths of the fused kernels of batch norm on this GPU, by tile, for layers of ResNet-50.

    python -m tools.fused_kernel_times [IMAGES]

Prints a Markdown table: the constants of `fused_calls` beside the fastest of all tiles. Used by gpu_session.sh.
"""

import sys
from collections.abc import Callable, Iterator
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor
from triton.testing import do_bench

from podscale.pytorch.batch_norm import fused_calls as calls
from podscale.pytorch.batch_norm import fused_pool_kernels as pool_kernels
from podscale.pytorch.batch_norm.fused_calls import MASK_OF_BITS, MASK_OF_X, ImageRows

LAYERS = ((64, 112), (256, 56), (64, 56), (512, 28), (1024, 14), (2048, 7))
"""Channels and sides of images."""
TILES = (2048, 4096, 8192)
TILE_CHANNELS = (64, 256)
PROGRAMS = (4, 8)
WARPS = (4, 8)
WARMUP_MS, REPEAT_MS = 3, 10


class Settings(NamedTuple):
    """Constants of `fused_calls`."""

    TILE: int
    TILE_CHANNELS: int
    PROGRAMS_PER_PROCESSOR: int
    WARPS: int

    def apply(self) -> None:
        for name, value in self._asdict().items():
            setattr(calls, name, value)


COMMITTED = Settings(calls.TILE, calls.TILE_CHANNELS, calls.PROGRAMS_PER_PROCESSOR, calls.WARPS)


def median_ms(function: Callable[[], object]) -> float:
    return float(do_bench(function, warmup=WARMUP_MS, rep=REPEAT_MS, return_mode="median"))


def copy_bandwidth() -> float:
    """Return the bandwidth of a copy of 1 GiB, bytes read and written, GB/s."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / median_ms(lambda: target.copy_(source)) / 1e6


def layer_kernels(
    images: int, channels: int, side: int, *, device: str = "cuda"
) -> Iterator[tuple[str, float, Callable[[], object]]]:
    """Yield name, passes over a tensor of the layer, and a call of each kernel by the settings that are applied."""

    def draw() -> Tensor:
        values = torch.randn(images, channels, side, side, device=device, dtype=torch.bfloat16)
        return values.contiguous(memory_format=torch.channels_last)

    x, shortcut, first, second = (draw() for _ in range(4))
    weight, bias, mean, var = (torch.rand(channels, device=device) for _ in range(4))
    shape = ImageRows.of(x)
    partial = calls.chunk_moments(x, shape)
    affine = calls.local_affine(partial, shape, weight, bias, (mean, var), 0.1, 1e-5)
    _, bits = calls.normalise(x, shape, affine, MASK_OF_BITS, shortcut)
    sums, _ = calls.chunk_gradient_sums((first, None), x, shape, affine, MASK_OF_X, None)
    terms = calls.local_gradient_terms(sums, shape, affine)
    added = (terms.slope, terms.constant)
    yield "moments", 1, lambda: calls.chunk_moments(x, shape)
    yield "finish moments", 0, lambda: calls.local_affine(partial, shape, weight, bias, (mean, var), 0.1, 1e-5)
    yield "relu", 2, lambda: calls.normalise(x, shape, affine, MASK_OF_X, None)
    yield "sum, relu", 3 + 1 / 16, lambda: calls.normalise(x, shape, affine, MASK_OF_BITS, shortcut)
    yield "gradient sums", 2, lambda: calls.chunk_gradient_sums((first, None), x, shape, affine, MASK_OF_X, None)
    yield (
        "gradient sums of a block",
        4 + 1 / 16,
        lambda: calls.chunk_gradient_sums((first, second), x, shape, affine, MASK_OF_BITS, bits),
    )
    yield "finish gradient sums", 0, lambda: calls.local_gradient_terms(sums, shape, affine)
    yield "input gradient", 3, lambda: calls.input_gradient(first, x, shape, affine, *added, MASK_OF_X)
    if side == LAYERS[0][1]:
        pooled, indices = pool_kernels.pool(x, affine)
        gradients = (torch.randn_like(pooled), torch.randn_like(pooled))
        yield "pool", 1.375, lambda: pool_kernels.pool(x, affine)
        yield (
            "pool gradient sums",
            1.625,
            lambda: pool_kernels.pool_chunk_gradient_sums(gradients, indices, x, affine),
        )
        yield (
            "pool input gradient",
            2.625,
            lambda: pool_kernels.pool_input_gradient(gradients, indices, x, affine, *added),
        )


def measure_layer(images: int, channels: int, side: int) -> Iterator[str]:
    """Yield a row of the table for each kernel of a layer."""
    times: dict[str, dict[Settings, float]] = {}
    passes: dict[str, float] = {}
    choices = {COMMITTED, *(Settings(*values) for values in product(TILES, TILE_CHANNELS, PROGRAMS, WARPS))}
    for settings in sorted(choices):
        settings.apply()
        for name, count, call in layer_kernels(images, channels, side):
            passes[name] = count
            times.setdefault(name, {})[settings] = median_ms(call)
    COMMITTED.apply()
    size = 2 * images * channels * side * side
    for name, by_settings in times.items():
        best = min(by_settings, key=by_settings.__getitem__)
        cells = [f"{channels} x {side}", name]
        for settings in (COMMITTED, best):
            milliseconds = by_settings[settings]
            cells += [f"{1e3 * milliseconds:.0f}", f"{passes[name] * size / milliseconds / 1e6:,.0f}"]
        yield f"| {' | '.join(cells)} | {', '.join(map(str, best))} |"


def main() -> None:
    images = int(sys.argv[1]) if len(sys.argv) > 1 else 256
    print(f"{torch.cuda.get_device_name()}, {images} images in bf16; a copy moves {copy_bandwidth():,.0f} GB/s.")
    print(f"Committed: {COMMITTED}\n")
    print("| layer | kernel | committed, us | GB/s | fastest, us | GB/s | tile, channels, programs, warps |")
    print("|---|---|---:|---:|---:|---:|---|")
    for channels, side in LAYERS:
        for row in measure_layer(images, channels, side):
            print(row, flush=True)


if __name__ == "__main__":
    main()
