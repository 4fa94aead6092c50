"""Calls of the kernels of 1x1 convolutions: tiles, and tensors of images in NHWC order.

The constants of the tiles are all here. They are guesses, since no GPU has measured them; `tools/gemm_kernel_times.py`
does, and prints those that are faster.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from podscale.pytorch.batch_norm import gemm_kernels as kernels
from podscale.pytorch.batch_norm.fused_calls import (
    CHANNELS_PER_BYTE,
    MASK_OF_BITS,
    MASK_OF_X,
    NO_MASK,
    Affine,
    ImageRows,
    Tiling,
    processors,
)

BLOCK_ROWS, BLOCK_INPUTS, BLOCK_OUTPUTS = 128, 64, 128
"""Tile of forward and data gradient: pixels, channels of a step of the product, largest number of output channels."""
SUM_INPUTS = 32
"""Channels of a step if a sum is computed while it is loaded, which takes more registers."""
SPLIT_ROWS, SPLIT_INPUTS, SPLIT_OUTPUTS = 64, 128, 128
"""Tile of the weight gradient: pixels of a step of the product, largest numbers of input and output channels."""
WARPS = 8
STAGES = 3
"""Steps of a product whose loads are in flight."""
SPLITS_PER_PROCESSOR = 2
"""Programs of a weight gradient for each multiprocessor."""
ADDED_ELEMENTS = 1024
"""Elements of a weight gradient that one program adds up."""
MERGED_TILES, MERGED_CHANNELS = 64, 64
"""Tile of the kernel that merges the sums of tiles."""
use_descriptors = False
"""Let the kernels read and write matrices by tensor descriptors (see `gemm_check`)."""


def _side(channels: int, largest: int) -> int:
    """Return the largest power of two that divides `channels`, at most `largest`."""
    return min(channels & -channels, largest)


def _operands(stride: int, *tiles: tuple[Tensor, int, int]) -> tuple[list[Any], bool]:
    """Return factors and result of a product, as tensors or as descriptors of their tiles, and True for descriptors.

    Args:
        stride: that of the convolution; only matrices of all pixels are described.
        tiles: each tensor with rows and columns of its tiles: images in NHWC order, which are a matrix [pixels,
            channels], or a weight [outputs, inputs, 1, 1].
    """
    if not use_descriptors or stride > 1:
        return [tensor for tensor, _, _ in tiles], False
    matrices = [tensor.permute(0, 2, 3, 1).view(-1, tensor.shape[1]) for tensor, _, _ in tiles]
    sides = [[rows, columns] for _, rows, columns in tiles]
    return [TensorDescriptor.from_tensor(*pair) for pair in zip(matrices, sides, strict=True)], True


class Sides(NamedTuple):
    """Sides of the images that a convolution writes and of those that it reads, and their ratio."""

    height: int
    width: int
    full_height: int
    full_width: int

    @classmethod
    def of(cls, strided: Tensor | torch.Size, full: Tensor | torch.Size) -> "Sides":
        sizes = [images.shape if isinstance(images, Tensor) else images for images in (strided, full)]
        return cls(*sizes[0][2:], *sizes[1][2:])


def moments_shape(y: Tensor) -> ImageRows:
    """Return the rows, channels and chunks of the moments of `y` [n, outputs, height, width] by `forward`."""
    outputs = y.shape[1]
    tiling = Tiling(BLOCK_ROWS, _side(outputs, BLOCK_OUTPUTS), BLOCK_ROWS * MERGED_TILES)
    return ImageRows(y.numel() // outputs, outputs, tiling)


def forward(x: Tensor, weight: Tensor, stride: int, affine: Affine | None) -> tuple[Tensor, Tensor]:
    """Return the convolution of `x`, and mean and sum of squared deviations of its chunks, fp32 [2, parts, outputs].

    Args:
        x: images [n, inputs, height, width] in NHWC order.
        weight: [outputs, inputs, 1, 1] in the dtype of `x`.
        affine: map that is applied to `x` first, with the ReLU after it; None: neither.
    """
    return _launch_forward(x, weight, stride, affine)


class SumForward(NamedTuple):
    """Convolution of a block's output, its moments as `forward` has them, the output and the mask of its ReLU."""

    y: Tensor
    partial: Tensor
    activated: Tensor
    bits: Tensor


def sum_forward(x: Tensor, affine: Affine, shortcut: Tensor, weight: Tensor) -> SumForward:
    """Return the convolution of max(0, x * scale + shift + shortcut), and what it reads.

    Args:
        x: images [n, inputs, height, width] in NHWC order.
        shortcut: images like `x`.
        weight: [outputs, inputs, 1, 1] in the dtype of `x`.
    """
    activated, inputs = torch.empty_like(x), x.shape[1]
    bits = torch.empty(x.numel() // inputs, inputs // CHANNELS_PER_BYTE, dtype=torch.uint8, device=x.device)
    result = _launch_forward(x, weight, 1, affine, (shortcut, activated, bits))
    return SumForward(*result, activated, bits)


def _launch_forward(
    x: Tensor,
    weight: Tensor,
    stride: int,
    affine: Affine | None,
    block: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the result of `forward`.

    Args:
        block: shortcut that is added before the ReLU, and what is written of the sum: its ReLU, and the mask.
    """
    n, inputs, height, width = x.shape
    outputs = weight.shape[0]
    size = (n, outputs, -(-height // stride), -(-width // stride))
    y = torch.empty(size, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    rows, side = y.numel() // outputs, _side(outputs, BLOCK_OUTPUTS)
    tiles, columns = -(-rows // BLOCK_ROWS), outputs // side
    partial = torch.empty(2, tiles, outputs, device=x.device)
    scale, shift = (partial, partial) if affine is None else (affine.scale, affine.shift)
    activation = NO_MASK if affine is None else MASK_OF_X if block is None else MASK_OF_BITS
    step = _side(inputs, SUM_INPUTS if block else BLOCK_INPUTS)
    (images, factor, result), described = _operands(
        stride, (x, BLOCK_ROWS, step), (weight, side, step), (y, BLOCK_ROWS, side)
    )
    kernels._gemm_forward_kernel[(tiles * columns,)](
        *(images, factor, scale, shift, *(block or (x, y, y)), result, partial[0], partial[1]),
        *(rows, inputs, outputs, columns, *Sides.of(y, x)),
        *(activation, stride, described, BLOCK_ROWS, step, side),
        num_warps=WARPS,
        num_stages=STAGES,
    )
    return y, _merge(partial, rows, moments=True)


def _merge(partial: Tensor, rows: int, *, moments: bool) -> Tensor:
    """Return the sums of groups of tiles, fp32 [2, parts, channels].

    Args:
        partial: sums of tiles, or means and squared deviations, fp32 [2, tiles, channels].
    """
    _, tiles, channels = partial.shape
    merged = torch.empty(2, -(-tiles // MERGED_TILES), channels, device=partial.device)
    kernels._gemm_merge_kernel[(merged.shape[1], -(-channels // MERGED_CHANNELS))](
        *(partial[0], partial[1], merged[0], merged[1], rows, tiles, channels),
        *(moments, BLOCK_ROWS, MERGED_TILES, MERGED_CHANNELS),
    )
    return merged


def data_gradient(gradient: Tensor, weight: Tensor, size: torch.Size, stride: int) -> Tensor:
    """Return the gradient of the convolution's input, of `size`.

    Args:
        gradient: that of the output, [n, outputs, height, width] in NHWC order.
        weight: [outputs, inputs, 1, 1] in the dtype of `gradient`.
    """
    dx = torch.empty(size, dtype=gradient.dtype, device=gradient.device, memory_format=torch.channels_last)
    if stride > 1:
        dx.zero_()  # at the pixels between the strides
    _launch_data_gradient(gradient, weight, dx, stride=stride)
    return dx


def masked_data_gradient(
    gradient: Tensor,
    weight: Tensor,
    x: Tensor,
    affine: Affine,
    *,
    bits: Tensor | None = None,
    second: Tensor | None = None,
    second_stride: int = 1,
) -> tuple[Tensor, Tensor]:
    """Return the gradient g of a batch norm's output through its ReLU, and the sums of its chunks.

    These are the sums of g and of g * (x - mean), fp32 [2, parts, inputs].

    Args:
        gradient: that of the convolution's output, [n, outputs, height, width] in NHWC order.
        weight: [outputs, inputs, 1, 1] in the dtype of `gradient`.
        x: images that the batch norm reads, [n, inputs, height, width] in NHWC order.
        bits: mask of the ReLU, uint8 [rows, inputs / 8]; None: it is computed from `x`.
        second: gradient of the other consumer at the pixels that it takes, every `second_stride`-th.
    """
    dx = torch.empty_like(x)
    partial = _launch_data_gradient(
        gradient, weight, dx, norm=(x, affine), bits=bits, second=second, second_stride=second_stride
    )
    return dx, _merge(partial, x.numel() // x.shape[1], moments=False)


def _launch_data_gradient(  # noqa: PLR0913 (operands of a kernel; each caller has some of them)
    gradient: Tensor,
    weight: Tensor,
    dx: Tensor,
    *,
    stride: int = 1,
    norm: tuple[Tensor, Affine] | None = None,
    bits: Tensor | None = None,
    second: Tensor | None = None,
    second_stride: int = 1,
) -> Tensor:
    """Write `dx`, and return the sums of tiles, fp32 [2, tiles, inputs], without `norm` of no tiles.

    Args:
        norm: what the batch norm before the convolution reads, and its map; None: neither mask nor sums.
    """
    outputs, inputs = weight.shape[:2]
    rows, side = gradient.numel() // outputs, _side(inputs, BLOCK_OUTPUTS)
    tiles, columns = -(-rows // BLOCK_ROWS), inputs // side
    partial = torch.empty(2, tiles if norm else 0, inputs, device=dx.device)
    x, per_channel, relu = dx, (partial,) * 3, NO_MASK
    if norm is not None:
        x, affine = norm
        per_channel, relu = (affine.mean, affine.scale, affine.shift), MASK_OF_X if bits is None else MASK_OF_BITS
    sides = Sides.of(gradient if second is None else second, dx)
    step = _side(outputs, BLOCK_INPUTS)
    (images, factor, result), described = _operands(
        stride, (gradient, BLOCK_ROWS, step), (weight, step, side), (dx, BLOCK_ROWS, side)
    )
    kernels._gemm_data_gradient_kernel[(tiles * columns,)](
        *(images, factor, gradient if second is None else second, x, x if bits is None else bits, *per_channel),
        *(result, partial[0], partial[1], rows, outputs, inputs, columns, *sides),
        *(relu, stride, 0 if second is None else second_stride, described, BLOCK_ROWS, step, side),
        num_warps=WARPS,
        num_stages=STAGES,
    )
    return partial


def weight_gradient(gradient: Tensor, x: Tensor, dtype: torch.dtype, stride: int, affine: Affine | None) -> Tensor:
    """Return the gradient of the weight, [outputs, inputs, 1, 1], in `dtype`.

    Args:
        gradient: that of the output, [n, outputs, height, width] in NHWC order.
        x: images [n, inputs, height, width] in NHWC order, to which `affine` and the ReLU are applied as in `forward`.
    """
    outputs, inputs, device = gradient.shape[1], x.shape[1], x.device
    rows = gradient.numel() // outputs
    blocks = (_side(inputs, SPLIT_INPUTS), _side(outputs, SPLIT_OUTPUTS))
    columns = inputs // blocks[0]
    tiles = columns * (outputs // blocks[1])
    steps, most_splits = -(-rows // SPLIT_ROWS), max(1, SPLITS_PER_PROCESSOR * processors(device) // tiles)
    chunk = -(-steps // most_splits) * SPLIT_ROWS
    splits = -(-rows // chunk)
    partial = torch.empty(splits, outputs, inputs, device=device)
    scale, shift = (partial, partial) if affine is None else (affine.scale, affine.shift)
    factors, described = _operands(stride, (gradient, SPLIT_ROWS, blocks[1]), (x, SPLIT_ROWS, blocks[0]))
    kernels._gemm_weight_gradient_kernel[(splits * tiles,)](
        *(*factors, scale, shift, partial, rows, inputs, outputs, chunk, columns, tiles, *Sides.of(gradient, x)),
        *(affine is not None, stride, described, SPLIT_ROWS, *blocks),
        num_warps=WARPS,
        num_stages=STAGES,
    )
    dw = torch.empty(outputs, inputs, 1, 1, dtype=dtype, device=device)
    kernels._gemm_add_splits_kernel[(-(-dw.numel() // ADDED_ELEMENTS),)](
        partial, dw, dw.numel(), splits, ADDED_ELEMENTS
    )
    return dw
