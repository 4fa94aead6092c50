"""Times of the kernels of 1x1 convolutions on this GPU beside cuDNN with fused batch norm, for layers of ResNet-50.

    python -m tools.gemm_kernel_times [IMAGES]

Prints a Markdown table: cuDNN's convolution with the passes of batch norm that the kernels save, the kernels by the
constants of `gemm_calls`, and by the fastest of other tiles and loads. Used by gpu_session.sh.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from podscale.pytorch.batch_norm import fused_calls
from podscale.pytorch.batch_norm import gemm_calls as calls
from podscale.pytorch.batch_norm.fused_calls import MASK_OF_BITS, MASK_OF_X, Affine, ImageRows
from podscale.util.kernel_errors import kernel_errors
from tools.fused_kernel_times import median_ms

INNER = ((64, 56), (128, 28), (256, 14), (512, 7))
"""Inner channels and sides of the blocks of each stage; their outputs have four times the channels."""
BLOCK_ROWS, BLOCK_OUTPUTS, WARPS = (64, 128), (64, 128), (4, 8)


class Tiles(NamedTuple):
    """Values of `gemm_calls`."""

    BLOCK_ROWS: int
    BLOCK_OUTPUTS: int
    WARPS: int
    use_descriptors: bool

    def apply(self) -> None:
        for name, value in self._asdict().items():
            setattr(calls, name, value)


COMMITTED = Tiles(calls.BLOCK_ROWS, calls.BLOCK_OUTPUTS, calls.WARPS, calls.use_descriptors)
Call = Callable[[], object]


class TimedPair(NamedTuple):
    """Work of a layer: separate calls, the call of the kernels, and the bytes that the kernels move at least."""

    name: str
    separate: Call
    kernels: Call
    bytes: int


@dataclass(frozen=True)
class Block:
    """Random bf16 tensors around conv1 (from wide to narrow images) and conv3 (back) of a bottleneck block.

    Args:
        wide: NHWC images, as `shortcut` and `wide_gradient` are.
        narrow: NHWC images of a quarter of the channels, as `narrow_gradient` is.
        down: Weight of conv1, OIHW.
        up: Weight of conv3, OIHW.
        bits: ReLU's mask of the sum of `wide` and `shortcut`, a bit a value.
    """

    wide: Tensor
    shortcut: Tensor
    wide_gradient: Tensor
    narrow: Tensor
    narrow_gradient: Tensor
    down: Tensor
    up: Tensor
    inner: Affine
    outer: Affine
    bits: Tensor | None

    @property
    def inner_rows(self) -> ImageRows:
        return ImageRows.of(self.narrow)

    @property
    def outer_rows(self) -> ImageRows:
        return ImageRows.of(self.wide)

    @property
    def small(self) -> int:
        """Bytes of a narrow tensor."""
        return 2 * self.narrow.numel()

    @property
    def large(self) -> int:
        """Bytes of a wide tensor."""
        return 2 * self.wide.numel()


def draw_block(images: int, inner: int, side: int, device: str) -> Block:
    """Return a block of random tensors, of `inner` narrow channels and images of `side` px."""
    outer = 4 * inner

    def draw(channels: int) -> Tensor:
        values = torch.randn(images, channels, side, side, device=device, dtype=torch.bfloat16)
        return values.contiguous(memory_format=torch.channels_last)

    def draw_weight(outputs: int, inputs: int) -> Tensor:
        return torch.randn(outputs, inputs, 1, 1, device=device, dtype=torch.bfloat16)

    wide, shortcut = draw(outer), draw(outer)
    inner_affine, outer_affine = (Affine(*torch.rand(5, channels, device=device)) for channels in (inner, outer))
    _, bits = fused_calls.normalise(wide, ImageRows.of(wide), outer_affine, MASK_OF_BITS, shortcut)
    return Block(
        wide=wide,
        shortcut=shortcut,
        wide_gradient=draw(outer),
        narrow=draw(inner),
        narrow_gradient=draw(inner),
        down=draw_weight(inner, outer),
        up=draw_weight(outer, inner),
        inner=inner_affine,
        outer=outer_affine,
        bits=bits,
    )


def block_calls(images: int, inner: int, side: int, *, device: str = "cuda") -> Iterator[TimedPair]:
    """Yield the work of both 1x1 convolutions of a block, forward and backward."""
    block = draw_block(images, inner, side, device)
    yield from _forward_calls(block)
    yield from _data_gradient_calls(block)
    yield from _weight_gradient_calls(block)


def _forward_calls(b: Block) -> Iterator[TimedPair]:
    def add_convolve_sum() -> None:
        y, _ = fused_calls.normalise(b.wide, b.outer_rows, b.outer, MASK_OF_BITS, b.shortcut)
        fused_calls.chunk_moments(F.conv2d(y, b.down), b.inner_rows)

    def normalise_convolve_sum() -> None:
        y, _ = fused_calls.normalise(b.narrow, b.inner_rows, b.inner, MASK_OF_X, None)
        fused_calls.chunk_moments(F.conv2d(y, b.up), b.outer_rows)

    yield TimedPair(
        "norm, sum, ReLU, conv1, moments",
        add_convolve_sum,
        lambda: calls.sum_forward(b.wide, b.outer, b.shortcut, b.down),
        3 * b.large + b.small,
    )
    yield TimedPair(
        "norm, ReLU, conv3, moments",
        normalise_convolve_sum,
        lambda: calls.forward(b.narrow, b.up, 1, b.inner),
        b.large + b.small,
    )


def _data_gradient_calls(b: Block) -> Iterator[TimedPair]:
    def data(gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return _backward(gradient, x, weight, (True, False, False))[0]

    def sums_of_first_norm() -> None:
        g = data(b.wide_gradient, b.narrow, b.up)
        fused_calls.chunk_gradient_sums((g, None), b.narrow, b.inner_rows, b.inner, MASK_OF_X, None)

    def sums_of_sum() -> None:
        g = data(b.narrow_gradient, b.wide, b.down)
        fused_calls.chunk_gradient_sums((g, b.shortcut), b.wide, b.outer_rows, b.outer, MASK_OF_BITS, b.bits)

    yield TimedPair(
        "data gradient of conv3, ReLU, sums",
        sums_of_first_norm,
        lambda: calls.masked_data_gradient(b.wide_gradient, b.up, b.narrow, b.inner),
        b.large + 2 * b.small,
    )
    yield TimedPair(
        "data gradient of conv1, sum, ReLU, sums",
        sums_of_sum,
        lambda: calls.masked_data_gradient(b.narrow_gradient, b.down, b.wide, b.outer, bits=b.bits, second=b.shortcut),
        b.small + 3 * b.large,
    )


def _weight_gradient_calls(b: Block) -> Iterator[TimedPair]:
    yield TimedPair(
        "weight gradient of conv1",
        lambda: _backward(b.narrow_gradient, b.wide, b.down, (False, True, False)),
        lambda: calls.weight_gradient(b.narrow_gradient, b.wide, torch.float32, 1, None),
        b.small + b.large,
    )
    yield TimedPair(
        "weight gradient of conv3",
        lambda: _backward(b.wide_gradient, b.narrow, b.up, (False, True, False)),
        lambda: calls.weight_gradient(b.wide_gradient, b.narrow, torch.float32, 1, b.inner),
        b.small + b.large,
    )


def _backward(gradient: Tensor, x: Tensor, weight: Tensor, mask: tuple[bool, bool, bool]) -> tuple[Tensor, ...]:
    sizes = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)  # stride, padding, dilation, no transposition, groups
    return torch.ops.aten.convolution_backward(gradient, x, weight, None, *sizes, mask)  # type: ignore[no-any-return]


def measure_block(images: int, inner: int, side: int) -> Iterator[str]:
    """Yield a row of the table for each work of a block."""
    pairs = list(block_calls(images, inner, side))
    choices = [COMMITTED, *(Tiles(*values) for values in product(BLOCK_ROWS, BLOCK_OUTPUTS, WARPS, (False, True)))]
    for pair in pairs:
        separate, times = median_ms(pair.separate), {}
        for tiles in dict.fromkeys(choices):
            tiles.apply()
            try:
                times[tiles] = median_ms(pair.kernels)
            except kernel_errors() as error:  # more registers or shared memory than there are, or no descriptors
                print(f"{tiles} does not run: {error}", file=sys.stderr)
        COMMITTED.apply()
        cells = [f"{inner} x {side}", pair.name, f"{1e3 * separate:.0f}"]
        if not times:
            yield f"| {' | '.join(cells)} | fails | | | | |"
            continue
        best = min(times, key=times.__getitem__)
        for milliseconds in (times.get(COMMITTED, float("nan")), times[best]):
            cells += [f"{1e3 * milliseconds:.0f}", f"{pair.bytes / milliseconds / 1e6:,.0f}"]
        yield f"| {' | '.join(cells)} | {', '.join(map(str, best))} |"


def main() -> None:
    images = int(sys.argv[1]) if len(sys.argv) > 1 else 256
    print(f"{torch.cuda.get_device_name()}, {images} images in bf16. Committed: {COMMITTED}\n")
    print("| inner channels | work | separate, us | kernels, us | GB/s | fastest, us | GB/s | its tiles and loads |")
    print("|---|---|---:|---:|---:|---:|---:|---|")
    for inner, side in INNER:
        for row in measure_block(images, inner, side):
            print(row, flush=True)


if __name__ == "__main__":
    main()
