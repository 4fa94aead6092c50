"""Times of the kernels of 1x1 convolutions on this GPU beside cuDNN with fused batch norm, for layers of ResNet-50.

    python -m tools.gemm_kernel_times [IMAGES]

Prints a Markdown table: cuDNN's convolution with the passes of batch norm that the kernels save, the kernels by the
constants of `gemm_calls`, and by the fastest of other tiles and loads. Used by gpu_session.sh.
"""

import sys
from collections.abc import Callable, Iterator
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


def block_calls(images: int, inner: int, side: int, *, device: str = "cuda") -> Iterator[TimedPair]:
    """Yield the work of both 1x1 convolutions of a block, forward and backward."""
    outer = 4 * inner

    def draw(channels: int) -> Tensor:
        values = torch.randn(images, channels, side, side, device=device, dtype=torch.bfloat16)
        return values.contiguous(memory_format=torch.channels_last)

    wide, shortcut, wide_gradient, narrow, narrow_gradient = map(draw, (outer, outer, outer, inner, inner))
    down, up = (torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in ((inner, outer), (outer, inner)))
    down, up = down[:, :, None, None], up[:, :, None, None]
    inner_affine, outer_affine = (Affine(*torch.rand(5, channels, device=device)) for channels in (inner, outer))
    inner_rows, outer_rows = ImageRows.of(narrow), ImageRows.of(wide)
    _, bits = fused_calls.normalise(wide, outer_rows, outer_affine, MASK_OF_BITS, shortcut)
    small, large = (2 * tensor.numel() for tensor in (narrow, wide))

    def convolve_then_sum(x: Tensor, weight: Tensor, rows: ImageRows) -> None:
        fused_calls.chunk_moments(F.conv2d(x, weight), rows)

    def add_convolve_sum() -> None:
        y, _ = fused_calls.normalise(wide, outer_rows, outer_affine, MASK_OF_BITS, shortcut)
        convolve_then_sum(y, down, inner_rows)

    def normalise_convolve_sum() -> None:
        y, _ = fused_calls.normalise(narrow, inner_rows, inner_affine, MASK_OF_X, None)
        convolve_then_sum(y, up, outer_rows)

    def data(gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return _backward(gradient, x, weight, (True, False, False))[0]

    def sums_of_first_norm() -> None:
        g = data(wide_gradient, narrow, up)
        fused_calls.chunk_gradient_sums((g, None), narrow, inner_rows, inner_affine, MASK_OF_X, None)

    def sums_of_sum() -> None:
        g = data(narrow_gradient, wide, down)
        fused_calls.chunk_gradient_sums((g, shortcut), wide, outer_rows, outer_affine, MASK_OF_BITS, bits)

    yield TimedPair(
        "norm, sum, ReLU, conv1, moments",
        add_convolve_sum,
        lambda: calls.sum_forward(wide, outer_affine, shortcut, down),
        3 * large + small,
    )
    yield TimedPair(
        "norm, ReLU, conv3, moments",
        normalise_convolve_sum,
        lambda: calls.forward(narrow, up, 1, inner_affine),
        large + small,
    )
    yield TimedPair(
        "data gradient of conv3, ReLU, sums",
        sums_of_first_norm,
        lambda: calls.masked_data_gradient(wide_gradient, up, narrow, inner_affine),
        large + 2 * small,
    )
    yield TimedPair(
        "data gradient of conv1, sum, ReLU, sums",
        sums_of_sum,
        lambda: calls.masked_data_gradient(narrow_gradient, down, wide, outer_affine, bits=bits, second=shortcut),
        small + 3 * large,
    )
    yield TimedPair(
        "weight gradient of conv1",
        lambda: _backward(narrow_gradient, wide, down, (False, True, False)),
        lambda: calls.weight_gradient(narrow_gradient, wide, torch.float32, 1, None),
        small + large,
    )
    yield TimedPair(
        "weight gradient of conv3",
        lambda: _backward(wide_gradient, narrow, up, (False, True, False)),
        lambda: calls.weight_gradient(wide_gradient, narrow, torch.float32, 1, inner_affine),
        small + large,
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
