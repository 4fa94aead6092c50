"""Triton kernels of a stem's batch norm, ReLU and max pooling (3x3, stride 2, padding 1) in one pass over the images.

Without them the largest activation of a ResNet is written and read three more times. The forward pass writes the
pooled image and the number of the pixel that each of its values is, from 0 to 8 in its window, or 15
if the ReLU is zero in all of it. The backward pass finds the gradient of a pixel in the up to four windows that contain
it. The sides of the images are even.

A program of the backward pass handles squares of 2x2 pixels. The pixels of square (y, x) are number 4 of window (y, x);
5 of it and 3 of (y, x + 1); 7 of it and 1 of (y + 1, x); 8, 6, 2 and 0 of the four windows.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from podscale.pytorch.batch_norm.fused_calls import Affine, image_tiling


@triton.jit(do_not_specialize=["outputs"])  # type: ignore[untyped-decorator]
def _pool_kernel(  # type: ignore[no-untyped-def]
    x,
    scale,
    shift,
    pooled,
    indices,
    outputs,
    height,
    width,
    channels,
    columns,
    block_rows: tl.constexpr,
    block_channels: tl.constexpr,
):
    """Write the largest max(0, x * scale + shift) of each window, and its number."""
    c = tl.program_id(0) % columns * block_channels + tl.arange(0, block_channels)
    q = tl.program_id(0) // columns * block_rows + tl.arange(0, block_rows)
    inside = c < channels
    a = tl.load(scale + c, mask=inside, other=0.0)[None, :]
    b = tl.load(shift + c, mask=inside, other=0.0)[None, :]
    half = width // 2
    column, line = q % half, q // half
    row, image = line % (height // 2), line // (height // 2)
    best = tl.zeros([block_rows, block_channels], tl.float32)
    index = tl.full([block_rows, block_channels], 15, tl.int32)
    for i in tl.static_range(3):
        for j in tl.static_range(3):
            h, w = 2 * row - 1 + i, 2 * column - 1 + j
            valid = (q < outputs) & (h >= 0) & (w >= 0)
            pixel = (image * height + h).to(tl.int64) * width + w
            mask = valid[:, None] & inside[None, :]
            value = tl.load(x + pixel[:, None] * channels + c[None, :], mask=mask, other=0.0).to(tl.float32) * a + b
            take = mask & ((value > best) | (value != value))
            best = tl.where(take, value, best)
            index = tl.where(take, 3 * i + j, index)
    mask = (q < outputs)[:, None] & inside[None, :]
    offsets = q.to(tl.int64)[:, None] * channels + c[None, :]
    tl.store(pooled + offsets, best.to(pooled.dtype.element_ty), mask=mask)
    tl.store(indices + offsets, index.to(tl.uint8), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _window(  # type: ignore[no-untyped-def]
    gradient, second_gradient, indices, square, valid, c, inside, channels, has_second: tl.constexpr
):
    """Return gradient and pixel number of windows."""
    mask = valid[:, None] & inside[None, :]
    offsets = square.to(tl.int64)[:, None] * channels + c[None, :]
    g = tl.load(gradient + offsets, mask=mask, other=0.0).to(tl.float32)
    if has_second:
        g += tl.load(second_gradient + offsets, mask=mask, other=0.0).to(tl.float32)
    return g, tl.load(indices + offsets, mask=mask, other=15).to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def _square_gradients(  # type: ignore[no-untyped-def]
    gradient, second_gradient, indices, q, squares, height, width, c, inside, channels, has_second: tl.constexpr
):
    """Return the gradients of the four pixels of each square."""
    half = width // 2
    column, row = q % half, q // half % (height // 2)
    present = q < squares
    right, below = present & (column + 1 < half), present & (row + 1 < height // 2)
    g00, i00 = _window(gradient, second_gradient, indices, q, present, c, inside, channels, has_second)
    g01, i01 = _window(gradient, second_gradient, indices, q + 1, right, c, inside, channels, has_second)
    g10, i10 = _window(gradient, second_gradient, indices, q + half, below, c, inside, channels, has_second)
    g11, i11 = _window(gradient, second_gradient, indices, q + half + 1, right & below, c, inside, channels, has_second)
    top_left = tl.where(i00 == 4, g00, 0.0)
    top_right = tl.where(i00 == 5, g00, 0.0) + tl.where(i01 == 3, g01, 0.0)
    bottom_left = tl.where(i00 == 7, g00, 0.0) + tl.where(i10 == 1, g10, 0.0)
    bottom_right = tl.where(i00 == 8, g00, 0.0) + tl.where(i01 == 6, g01, 0.0)
    bottom_right += tl.where(i10 == 2, g10, 0.0) + tl.where(i11 == 0, g11, 0.0)
    return top_left, top_right, bottom_left, bottom_right


@triton.jit
def _square_offsets(q, height, width, c, channels):  # type: ignore[no-untyped-def]
    """Return the offsets of the top left pixel of each square."""
    half = width // 2
    line = q // half
    row, image = line % (height // 2), line // (height // 2)
    pixel = (image * height + 2 * row).to(tl.int64) * width + 2 * (q % half)
    return pixel[:, None] * channels + c[None, :]


@triton.jit(do_not_specialize=["squares", "chunk"])  # type: ignore[untyped-decorator]
def _pool_gradient_sums_kernel(  # type: ignore[no-untyped-def]
    gradient,
    second_gradient,
    indices,
    x,
    mean,
    sums,
    products,
    squares,
    height,
    width,
    channels,
    chunk,
    has_second: tl.constexpr,
    block_rows: tl.constexpr,
    block_channels: tl.constexpr,
):
    """Write the sums of g and g * (x - mean) of one chunk of squares, g being the gradient of a pixel."""
    part = tl.program_id(0)
    c = tl.program_id(1) * block_channels + tl.arange(0, block_channels)
    inside = c < channels
    first = part * chunk
    last = tl.minimum(first + chunk, squares)
    centre = tl.load(mean + c, mask=inside, other=0.0)[None, :]
    total = tl.zeros([block_rows, block_channels], tl.float32)
    product = tl.zeros([block_rows, block_channels], tl.float32)
    for start in range(first, last, block_rows):
        q = start + tl.arange(0, block_rows)
        mask = (q < last)[:, None] & inside[None, :]
        g0, g1, g2, g3 = _square_gradients(
            gradient, second_gradient, indices, q, last, height, width, c, inside, channels, has_second
        )
        at = x + _square_offsets(q, height, width, c, channels)
        x0 = tl.load(at, mask=mask, other=0.0).to(tl.float32) - centre
        x1 = tl.load(at + channels, mask=mask, other=0.0).to(tl.float32) - centre
        x2 = tl.load(at + width * channels, mask=mask, other=0.0).to(tl.float32) - centre
        x3 = tl.load(at + (width + 1) * channels, mask=mask, other=0.0).to(tl.float32) - centre
        total += (g0 + g1) + (g2 + g3)
        product += (g0 * x0 + g1 * x1) + (g2 * x2 + g3 * x3)
    tl.store(sums + part * channels + c, tl.sum(total, 0), mask=inside)
    tl.store(products + part * channels + c, tl.sum(product, 0), mask=inside)


@triton.jit(do_not_specialize=["squares"])  # type: ignore[untyped-decorator]
def _pool_input_gradient_kernel(  # type: ignore[no-untyped-def]
    gradient,
    second_gradient,
    indices,
    x,
    mean,
    scale,
    slope,
    constant,
    dx,
    squares,
    height,
    width,
    channels,
    columns,
    has_second: tl.constexpr,
    block_rows: tl.constexpr,
    block_channels: tl.constexpr,
):
    """Write scale * g + slope * (x - mean) + constant for the four pixels of each square."""
    c = tl.program_id(0) % columns * block_channels + tl.arange(0, block_channels)
    q = tl.program_id(0) // columns * block_rows + tl.arange(0, block_rows)
    inside = c < channels
    mask = (q < squares)[:, None] & inside[None, :]
    a = tl.load(scale + c, mask=inside, other=0.0)[None, :]
    k = tl.load(slope + c, mask=inside, other=0.0)[None, :]
    d = tl.load(constant + c, mask=inside, other=0.0)[None, :] - k * tl.load(mean + c, mask=inside, other=0.0)[None, :]
    g0, g1, g2, g3 = _square_gradients(
        gradient, second_gradient, indices, q, squares, height, width, c, inside, channels, has_second
    )
    offsets = _square_offsets(q, height, width, c, channels)
    x0 = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    x1 = tl.load(x + offsets + channels, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(x + offsets + width * channels, mask=mask, other=0.0).to(tl.float32)
    x3 = tl.load(x + offsets + (width + 1) * channels, mask=mask, other=0.0).to(tl.float32)
    tl.store(dx + offsets, (a * g0 + k * x0 + d).to(dx.dtype.element_ty), mask=mask)
    tl.store(dx + offsets + channels, (a * g1 + k * x1 + d).to(dx.dtype.element_ty), mask=mask)
    tl.store(dx + offsets + width * channels, (a * g2 + k * x2 + d).to(dx.dtype.element_ty), mask=mask)
    tl.store(dx + offsets + (width + 1) * channels, (a * g3 + k * x3 + d).to(dx.dtype.element_ty), mask=mask)


class PoolShape(NamedTuple):
    """Pooled images [n, channels, height / 2, width / 2] as rows, and the sides of the images."""

    squares: int
    height: int
    width: int
    channels: int

    @classmethod
    def of(cls, x: Tensor) -> "PoolShape":
        n, channels, height, width = x.shape
        return cls(n * (height // 2) * (width // 2), height, width, channels)


PASSES_PER_TILE = 4
"""Factor by which tiles are smaller than those of `fused_calls`, since a program holds four pixels or windows."""


def pool(x: Tensor, affine: Affine) -> tuple[Tensor, Tensor]:
    """Return max(0, x * scale + shift), pooled, and the pixel number of each value, uint8 in the same shape.

    Args:
        x: images [n, channels, height, width] in NHWC order.
    """
    shape = PoolShape.of(x)
    n, channels, height, width = x.shape
    pooled = torch.empty(n, channels, height // 2, width // 2, dtype=x.dtype, device=x.device)
    pooled = pooled.contiguous(memory_format=torch.channels_last)
    indices = torch.empty_like(pooled, dtype=torch.uint8)
    tile = image_tiling(shape.squares, channels, x.device)
    columns = -(-channels // tile.channels)
    _pool_kernel[(-(-shape.squares // tile.rows) * columns,)](
        *(x, affine.scale, affine.shift, pooled, indices, *shape, columns, tile.rows, tile.channels), num_warps=8
    )
    return pooled, indices


def pool_chunk_gradient_sums(
    gradients: tuple[Tensor, Tensor | None], indices: Tensor, x: Tensor, affine: Affine
) -> Tensor:
    """Return the sums of each chunk, fp32 [2, parts, channels] (see `fused_calls.chunk_gradient_sums`).

    Args:
        gradients: those of the consumers of the pooled images, in their shape.
        indices: pixel numbers by `pool`, uint8 in the same shape.
        x: images [n, channels, height, width] in NHWC order.
    """
    shape = PoolShape.of(x)
    tile = image_tiling(shape.squares, shape.channels, x.device)
    parts, columns = -(-shape.squares // tile.chunk), -(-shape.channels // tile.channels)
    partial = torch.empty(2, parts, shape.channels, device=x.device)
    first, second = gradients
    _pool_gradient_sums_kernel[(parts, columns)](
        *(first, first if second is None else second, indices, x, affine.mean, partial[0], partial[1], *shape),
        *(tile.chunk, second is not None, max(1, tile.rows // PASSES_PER_TILE), tile.channels),
        num_warps=4,
    )
    return partial


def pool_input_gradient(
    gradients: tuple[Tensor, Tensor | None],
    indices: Tensor,
    x: Tensor,
    affine: Affine,
    slope: Tensor,
    constant: Tensor,
) -> Tensor:
    """Return the gradient of x (see `fused_calls.input_gradient`).

    Args:
        gradients: those of the consumers of the pooled images, in their shape.
        indices: pixel numbers by `pool`, uint8 in the same shape.
        x: images [n, channels, height, width] in NHWC order.
        slope: fp32 [channels].
        constant: fp32 [channels].
    """
    shape, dx = PoolShape.of(x), torch.empty_like(x)
    tile = image_tiling(shape.squares, shape.channels, x.device)
    rows, columns = max(1, tile.rows // PASSES_PER_TILE), -(-shape.channels // tile.channels)
    first, second = gradients
    _pool_input_gradient_kernel[(-(-shape.squares // rows) * columns,)](
        *(first, first if second is None else second, indices, x, affine.mean, affine.scale, slope, constant, dx),
        *(*shape, columns, second is not None, rows, tile.channels),
        num_warps=4,
    )
    return dx
