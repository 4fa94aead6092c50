"""Calls of the kernels of 1x1 convolutions: tiles, and tensors of images in NHWC order.

The constants of the tiles are all here. They are guesses, since no GPU has measured them; `tools/fused_kernel_times.py`
does, and prints those that are faster.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from podscale.pytorch.batch_norm import gemm_kernels as gemm
from podscale.pytorch.batch_norm.fused_kernels import (
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
SPLIT_ROWS, SPLIT_INPUTS, SPLIT_OUTPUTS = 64, 128, 128
"""Tile of the weight gradient: pixels of a step of the product, largest numbers of input and output channels."""
WARPS = 8
STAGES = 3
"""Steps of a product whose loads are in flight."""
PROGRAMS_PER_PROCESSOR = 2
ADDED_ELEMENTS = 1024
"""Elements of a weight gradient that one program adds up."""
LEAST_SIDE = 16
"""Smallest side of a tile: that of a tensor core's product."""


class GemmTiling(NamedTuple):
    """Tiles of the product of [rows, inputs] and [inputs, outputs], and rows of a chunk."""

    rows: int
    inputs: int
    outputs: int
    chunk: int

    @classmethod
    def of(cls, rows: int, inputs: int, outputs: int, device: torch.device) -> "GemmTiling":
        """Return tiles as large as the constants and the channels allow; chunks so many that they fill the device."""
        block = _side(outputs, BLOCK_OUTPUTS)
        parts = max(1, PROGRAMS_PER_PROCESSOR * processors(device) // -(-outputs // block))
        return cls(BLOCK_ROWS, _side(inputs, BLOCK_INPUTS), block, _chunk(rows, BLOCK_ROWS, parts))


def _side(channels: int, largest: int) -> int:
    return max(LEAST_SIDE, min(triton.next_power_of_2(channels), largest))


def _chunk(rows: int, block: int, parts: int) -> int:
    return -(-(-(-rows // block)) // parts) * block


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


def moments_shape(y: Tensor, inputs: int) -> ImageRows:
    """Return the rows, channels and chunks of the moments that `forward` computes.

    Args:
        y: images that the convolution writes, [n, outputs, height, width].
        inputs: channels that it reads.
    """
    outputs = y.shape[1]
    rows = y.numel() // outputs
    tile = GemmTiling.of(rows, inputs, outputs, y.device)
    return ImageRows(rows, outputs, Tiling(tile.rows, tile.outputs, tile.chunk))


def forward(x: Tensor, weight: Tensor, stride: int, affine: Affine | None) -> tuple[Tensor, Tensor]:
    """Return the convolution of `x`, and mean and sum of squared deviations of its chunks, fp32 [2, parts, outputs].

    Args:
        x: images [n, inputs, height, width] in NHWC order.
        weight: [outputs, inputs, 1, 1] in the dtype of `x`.
        affine: map that is applied to `x` first, with the ReLU after it; None: neither.
    """
    n, inputs, height, width = x.shape
    outputs = weight.shape[0]
    size = (n, outputs, -(-height // stride), -(-width // stride))
    y = torch.empty(size, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    shape = moments_shape(y, inputs)
    tile = GemmTiling.of(shape.rows, inputs, outputs, x.device)
    partial = torch.empty(2, shape.parts, outputs, device=x.device)
    scale, shift = (partial, partial) if affine is None else (affine.scale, affine.shift)
    gemm._forward_kernel[(shape.parts * shape.columns,)](
        *(x, weight, scale, shift, y, partial[0], partial[1], shape.rows, inputs, outputs, tile.chunk, shape.columns),
        *(*Sides.of(y, x), affine is not None, stride, *tile[:3]),
        num_warps=WARPS,
        num_stages=STAGES,
    )
    return y, partial


def data_gradient(gradient: Tensor, weight: Tensor, size: torch.Size, stride: int) -> Tensor:
    """Return the gradient of the convolution's input, of `size`.

    Args:
        gradient: that of the output, [n, outputs, height, width] in NHWC order.
        weight: [outputs, inputs, 1, 1] in the dtype of `gradient`.
    """
    dx = torch.empty(size, dtype=gradient.dtype, device=gradient.device, memory_format=torch.channels_last)
    if stride > 1:
        dx.zero_()  # at the pixels between the strides
    _launch_data_gradient(gradient, weight, dx, dx, NO_MASK, stride=stride)
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

    The sums are those of g and g * (x - mean), fp32 [2, parts, inputs].

    Args:
        gradient: that of the convolution's output, [n, outputs, height, width] in NHWC order.
        weight: [outputs, inputs, 1, 1] in the dtype of `gradient`.
        x: images that the batch norm reads, [n, inputs, height, width] in NHWC order.
        bits: mask of the ReLU, uint8 [rows, inputs / 8]; None: it is computed from `x`.
        second: gradient of the other consumer at the pixels that it takes, every `second_stride`-th.
    """
    dx = torch.empty_like(x)
    relu = MASK_OF_X if bits is None else MASK_OF_BITS
    options = {"affine": affine, "bits": bits, "second": second, "second_stride": second_stride}
    return dx, _launch_data_gradient(gradient, weight, dx, x, relu, **options)  # type: ignore[arg-type]


def _launch_data_gradient(
    gradient: Tensor,
    weight: Tensor,
    dx: Tensor,
    x: Tensor,
    relu: int,
    *,
    stride: int = 1,
    affine: Affine | None = None,
    bits: Tensor | None = None,
    second: Tensor | None = None,
    second_stride: int = 1,
) -> Tensor:
    outputs, inputs = weight.shape[:2]
    rows = gradient.numel() // outputs
    tile = GemmTiling.of(rows, outputs, inputs, dx.device)
    parts, columns = -(-rows // tile.chunk), -(-inputs // tile.outputs)
    partial = torch.empty(2, parts if affine else 0, inputs, device=dx.device)
    per_channel = (affine.mean, affine.scale, affine.shift) if affine else (partial,) * 3
    sides = Sides.of(gradient, dx) if second is None else Sides.of(second, dx)
    gemm._data_gradient_kernel[(parts * columns,)](
        *(gradient, weight, gradient if second is None else second, x, x if bits is None else bits, *per_channel),
        *(dx, partial[0], partial[1], rows, outputs, inputs, tile.chunk, columns, *sides),
        *(relu, stride, 0 if second is None else second_stride, *tile[:3]),
        num_warps=WARPS,
        num_stages=STAGES,
    )
    return partial


def weight_gradient(
    gradient: Tensor, x: Tensor, dtype: torch.dtype, stride: int, affine: Affine | None
) -> Tensor:
    """Return the gradient of the weight, [outputs, inputs, 1, 1], in `dtype`.

    Args:
        gradient: that of the output, [n, outputs, height, width] in NHWC order.
        x: images [n, inputs, height, width] in NHWC order, to which `affine` and the ReLU are applied as in `forward`.
    """
    outputs, inputs, device = gradient.shape[1], x.shape[1], x.device
    rows = gradient.numel() // outputs
    blocks = (_side(inputs, SPLIT_INPUTS), _side(outputs, SPLIT_OUTPUTS))
    columns = -(-inputs // blocks[0])
    tiles = columns * -(-outputs // blocks[1])
    chunk = _chunk(rows, SPLIT_ROWS, max(1, PROGRAMS_PER_PROCESSOR * processors(device) // tiles))
    splits = -(-rows // chunk)
    partial = torch.empty(splits, outputs, inputs, device=device)
    scale, shift = (partial, partial) if affine is None else (affine.scale, affine.shift)
    gemm._weight_gradient_kernel[(splits * tiles,)](
        *(gradient, x, scale, shift, partial, rows, inputs, outputs, chunk, columns, tiles, *Sides.of(gradient, x)),
        *(affine is not None, stride, SPLIT_ROWS, *blocks),
        num_warps=WARPS,
        num_stages=STAGES,
    )
    dw = torch.empty(outputs, inputs, 1, 1, dtype=dtype, device=device)
    gemm._add_splits_kernel[(-(-dw.numel() // ADDED_ELEMENTS),)](partial, dw, dw.numel(), splits, ADDED_ELEMENTS)
    return dw
