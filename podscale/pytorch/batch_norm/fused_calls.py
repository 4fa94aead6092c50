"""Calls of the kernels of batch norm: tiles, and tensors of images in NHWC order."""

from functools import cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from podscale.pytorch.batch_norm import fused_kernels as kernels

TILE = 4096
"""Values of a tile: 16 bytes in flight four times for each of 128 threads."""
TILE_CHANNELS = 256
"""Most channels of a tile."""
WARPS = 4
PROGRAMS_PER_PROCESSOR = 4
"""Programs of a sum for each multiprocessor."""
PROCESSORS_WITHOUT_GPU = 4
"""Multiprocessors that Triton's interpreter stands for."""
CHANNELS_PER_BYTE = 8
FINISH_PARTS, FINISH_CHANNELS = 128, 16
"""Tile of the kernels that add up chunks."""

NO_MASK, MASK_OF_X, MASK_OF_BITS = 0, 1, 2
"""ReLU of an output: none, one whose mask follows from x, and one of a sum, whose mask is in bits."""


class Tiling(NamedTuple):
    """Tiles of an image tensor: rows and channels of a tile, and rows of a chunk."""

    rows: int
    channels: int
    chunk: int


def image_tiling(rows: int, channels: int, device: torch.device) -> Tiling:
    """Return the tiling of [rows, channels]; chunks so many that they fill the device."""
    tile_channels = min(triton.next_power_of_2(channels), TILE_CHANNELS)
    tile_rows = TILE // tile_channels
    columns = -(-channels // tile_channels)
    parts = max(1, PROGRAMS_PER_PROCESSOR * processors(device) // columns)
    tiles = -(-rows // tile_rows)
    return Tiling(tile_rows, tile_channels, -(-tiles // parts) * tile_rows)


@cache
def processors(device: torch.device) -> int:
    if device.type != "cuda":
        return PROCESSORS_WITHOUT_GPU
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


class ImageRows(NamedTuple):
    """Shape of NHWC images as rows."""

    rows: int
    channels: int
    tiling: Tiling

    @classmethod
    def of(cls, x: Tensor) -> "ImageRows":
        channels = x.shape[1]
        rows = x.numel() // channels
        return cls(rows, channels, image_tiling(rows, channels, x.device))

    @property
    def parts(self) -> int:
        return -(-self.rows // self.tiling.chunk)

    @property
    def columns(self) -> int:
        return -(-self.channels // self.tiling.channels)

    @property
    def tiles(self) -> int:
        return -(-self.rows // self.tiling.rows) * self.columns


class Affine(NamedTuple):
    """Batch norm's map of one batch, fp32 [channels] each; `var` is biased."""

    mean: Tensor
    var: Tensor
    invstd: Tensor
    scale: Tensor
    shift: Tensor


def chunk_moments(x: Tensor, shape: ImageRows) -> Tensor:
    """Return mean and sum of squared deviations of each chunk of images `x`, fp32 [2, parts, channels]."""
    partial = torch.empty(2, shape.parts, shape.channels, device=x.device)
    tile = shape.tiling
    kernels._moments_kernel[(shape.parts, shape.columns)](
        x, partial[0], partial[1], shape.rows, shape.channels, tile.chunk, tile.rows, tile.channels, num_warps=WARPS
    )
    return partial


def local_affine(
    partial: Tensor,
    shape: ImageRows,
    weight: Tensor,
    bias: Tensor,
    running: tuple[Tensor, Tensor],
    momentum: float,
    eps: float,
) -> Affine:
    """Return the map by the moments of this rank alone, and move the running statistics.

    Args:
        partial: those of `chunk_moments`, fp32 [2, parts, channels].
        weight: scale, fp32 [channels].
        bias: shift, fp32 [channels].
        running: mean and variance, fp32 [channels], changed in place.
    """
    out = partial.new_empty(5, shape.channels)
    kernels._finish_moments_kernel[(-(-shape.channels // FINISH_CHANNELS),)](
        *(partial[0], partial[1], weight, bias, *running, out),
        *(shape.rows, shape.channels, shape.tiling.chunk, shape.parts, eps, momentum),
        affine=True,
        block_parts=FINISH_PARTS,
        block_channels=FINISH_CHANNELS,
    )
    return Affine(*out.unbind())


def local_moments(partial: Tensor, shape: ImageRows) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance of this rank, fp32 [channels].

    Args:
        partial: those of `chunk_moments`, fp32 [2, parts, channels].
    """
    out = partial.new_empty(2, shape.channels)
    kernels._finish_moments_kernel[(-(-shape.channels // FINISH_CHANNELS),)](
        *(partial[0], partial[1], out, out, out, out, out),
        *(shape.rows, shape.channels, shape.tiling.chunk, shape.parts, 0.0, 0.0),
        affine=False,
        block_parts=FINISH_PARTS,
        block_channels=FINISH_CHANNELS,
    )
    return out[0], out[1]


def normalise(
    x: Tensor, shape: ImageRows, affine: Affine, relu: int, shortcut: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return the output, and with `MASK_OF_BITS` the mask of its ReLU, uint8 [rows, channels / 8].

    Args:
        x: images [n, channels, height, width] in NHWC order.
        shortcut: what `MASK_OF_BITS` adds before the ReLU, like `x`.
    """
    y, tile = torch.empty_like(x), shape.tiling
    bits = None
    if relu == MASK_OF_BITS:
        bits = torch.empty(shape.rows, shape.channels // CHANNELS_PER_BYTE, dtype=torch.uint8, device=x.device)
    kernels._normalise_kernel[(shape.tiles,)](
        *(x, affine.scale, affine.shift, x if shortcut is None else shortcut, y, y if bits is None else bits),
        *(shape.rows, shape.channels, shape.columns, relu, tile.rows, tile.channels),
        num_warps=WARPS,
    )
    return y, bits


def chunk_gradient_sums(
    gradients: tuple[Tensor, Tensor | None],
    x: Tensor,
    shape: ImageRows,
    affine: Affine,
    relu: int,
    bits: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the sums of each chunk, fp32 [2, parts, channels], and the gradient that `input_gradient` takes.

    That is `gradients[0]` itself, or with `MASK_OF_BITS` the masked sum of both, in the dtype of x.

    Args:
        gradients: those of the output's consumers, like `x`.
        x: images [n, channels, height, width] in NHWC order.
        bits: mask of the ReLU by `normalise`, uint8 [rows, channels / 8].
    """
    partial = torch.empty(2, shape.parts, shape.channels, device=x.device)
    first, second = gradients
    masked = torch.empty_like(x) if relu == MASK_OF_BITS else None
    tile = shape.tiling
    kernels._gradient_sums_kernel[(shape.parts, shape.columns)](
        *(first, first if second is None else second, x, x if bits is None else bits),
        *(affine.mean, affine.scale, affine.shift, partial if masked is None else masked, partial[0], partial[1]),
        *(shape.rows, shape.channels, tile.chunk, relu, second is not None, tile.rows, tile.channels),
        num_warps=WARPS,
    )
    return partial, first if masked is None else masked


class InputGradientTerms(NamedTuple):
    """Gradients of bias and weight, and what the input gradient adds to scale * g, fp32 [channels] each."""

    bias: Tensor
    weight: Tensor
    slope: Tensor
    constant: Tensor


def local_gradient_terms(partial: Tensor, shape: ImageRows, affine: Affine) -> InputGradientTerms:
    """Return the terms by the sums of this rank alone.

    Args:
        partial: those of `chunk_gradient_sums`, fp32 [2, parts, channels].
    """
    return InputGradientTerms(*_finish_gradient_sums(partial, shape, affine, 4).unbind())


def local_gradient_sums(partial: Tensor, shape: ImageRows, affine: Affine) -> Tensor:
    """Return sum(g) and sum(g * (x - mean)) of this rank, fp32 [2, channels].

    Args:
        partial: those of `chunk_gradient_sums`, fp32 [2, parts, channels].
    """
    return _finish_gradient_sums(partial, shape, affine, 2)


def _finish_gradient_sums(partial: Tensor, shape: ImageRows, affine: Affine, outputs: int) -> Tensor:
    out = partial.new_empty(outputs, shape.channels)
    kernels._finish_gradient_sums_kernel[(-(-shape.channels // FINISH_CHANNELS),)](
        *(partial[0], partial[1], affine.invstd, affine.scale, out, shape.rows, shape.channels, partial.shape[1]),
        local=outputs == 4,
        block_parts=FINISH_PARTS,
        block_channels=FINISH_CHANNELS,
    )
    return out


def input_gradient(
    gradient: Tensor, x: Tensor, shape: ImageRows, affine: Affine, slope: Tensor, constant: Tensor, relu: int
) -> Tensor:
    """Return scale * g + slope * (x - mean) + constant, g being `gradient`, masked again if `relu` is `MASK_OF_X`.

    Args:
        gradient: like `x`.
        x: images [n, channels, height, width] in NHWC order.
        slope: fp32 [channels].
        constant: fp32 [channels].
    """
    dx, tile = torch.empty_like(x), shape.tiling
    kernels._input_gradient_kernel[(shape.tiles,)](
        *(gradient, x, affine.mean, affine.scale, affine.shift, slope, constant, dx),
        *(shape.rows, shape.channels, shape.columns, relu, tile.rows, tile.channels),
        num_warps=WARPS,
    )
    return dx
