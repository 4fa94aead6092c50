"""Triton kernels that crop, resize, mirror and pad a batch of decoded images on a GPU, three launches for all of them.

They compute as PIL does: weights in fp64, rounded to fixed point with 22 bits; one axis, rounded to 8 bits, then the
other. The first axis is the one that the installed PIL begins with. If that is the vertical one, the table of crops has
rows and columns swapped, and the kernels read and write with swapped steps. On a GPU, a fused multiply-add may move a
weight by one unit of its last bit.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import PIL
import torch
import triton
import triton.language as tl
from torch import Tensor

from podscale.config.data import Interpolation
from podscale.data.crop import CropParamsBatch
from podscale.data.native import ORDERS, PassOrder

FIELDS = 13
"""Columns of the table of crops, int32: steps to the next row and column of the image, left, top, width, height,
out_width, out_height, out_left, out_top, mirrored across, mirrored down, 1 if rows and columns are swapped."""
PILLOW_ORDER: PassOrder = ORDERS[int(PIL.__version__.partition(".")[0]) < 13]
"""Order of the passes in the installed PIL."""
VERY_HIGH = 100
"""Height over width above which PIL before version 13 resizes vertically first."""
SUPPORT = {"bilinear": 1.0, "bicubic": 2.0}
"""Half the width of each filter, in pixels of the output."""
BLOCK_OUTPUTS, BLOCK_ROWS = 128, 4


@triton.jit  # type: ignore[untyped-decorator]
def _filter_weight(distance, cubic: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return PIL's filters, in fp64: a triangle, or Keys' cubic with a = -0.5."""
    x = tl.abs(distance)
    if cubic:
        near = ((-0.5 + 2.0) * x - (-0.5 + 3.0)) * x * x + 1.0
        far = (((x - 5.0) * x + 8.0) * x - 4.0) * -0.5
        return tl.where(x < 1.0, near, tl.where(x < 2.0, far, 0.0))
    return tl.where(x < 1.0, 1.0 - x, 0.0)


@triton.jit(do_not_specialize=["taps"])  # type: ignore[untyped-decorator]
def _weights_kernel(  # type: ignore[no-untyped-def]
    crops, firsts, weights, size, taps, fields: tl.constexpr, cubic: tl.constexpr, block: tl.constexpr
):
    """Write the first pixel and the fixed-point weights of each output along one axis; zeros outside of the image."""
    image, axis = tl.program_id(0), tl.program_id(1)
    o = tl.program_id(2) * block + tl.arange(0, block)
    row = crops + image * fields
    inputs = tl.load(row + 4 + axis)
    outputs = tl.load(row + 6 + axis)
    mirrored = tl.load(row + 10 + axis) != 0
    output = tl.load(row + 8 + axis) + tl.where(mirrored, size - 1 - o, o)
    inside = (output >= 0) & (output < outputs) & (o < size)
    scale = inputs.to(tl.float64) / outputs.to(tl.float64)
    shrink = tl.maximum(scale, 1.0)
    support = shrink
    if cubic:
        support = 2.0 * shrink
    inverse = 1.0 / shrink
    center = (output.to(tl.float64) + 0.5) * scale
    first = tl.maximum((center - support + 0.5).to(tl.int32), 0)
    end = tl.minimum((center + support + 0.5).to(tl.int32), inputs)
    total = tl.zeros([block], tl.float64)
    for tap in range(taps):
        weight = _filter_weight(((first + tap).to(tl.float64) - center + 0.5) * inverse, cubic)
        total += tl.where(first + tap < end, weight, 0.0)
    line = image * 2 + axis
    tl.store(firsts + line * size + o, tl.where(inside, first, 0), mask=o < size)
    for tap in range(taps):
        weight = _filter_weight(((first + tap).to(tl.float64) - center + 0.5) * inverse, cubic)
        share = tl.where(inside & (first + tap < end), weight / tl.where(total == 0.0, 1.0, total), 0.0)
        scaled = share * 4194304.0  # 2^22, for 22 bits behind the point (Pillow, src/libImaging/Resample.c)
        fixed = tl.where(share < 0.0, scaled - 0.5, scaled + 0.5).to(tl.int32)
        tl.store(weights + (line * taps + tap).to(tl.int64) * size + o, tl.where(share == 0.0, 0, fixed), mask=o < size)


@triton.jit
def _to_byte(total):  # type: ignore[no-untyped-def]
    """Return sums in fixed point as 8 bits, rounded and clipped."""
    return tl.minimum(tl.maximum(total >> 22, 0), 255).to(tl.uint8)


@triton.jit(do_not_specialize=["taps"])  # type: ignore[untyped-decorator]
def _rows_kernel(  # type: ignore[no-untyped-def]
    addresses,
    plane_sizes,
    crops,
    begins,
    firsts,
    weights,
    narrow,
    size,
    taps,
    fields: tl.constexpr,
    block_rows: tl.constexpr,
    block: tl.constexpr,
):
    """Resize along the first axis: planes of the decoded images -> narrow [rows of all rectangles, size, 3]."""
    image = tl.program_id(0)
    row = crops + image * fields
    height = tl.load(row + 5)
    first_row = tl.program_id(1) * block_rows
    if first_row < height:
        r = first_row + tl.arange(0, block_rows)
        o = tl.program_id(2) * block + tl.arange(0, block)
        row_step, column_step = tl.load(row).to(tl.int64), tl.load(row + 1).to(tl.int64)
        left, top, width = tl.load(row + 2), tl.load(row + 3), tl.load(row + 4)
        first = tl.load(firsts + image * 2 * size + o, mask=o < size, other=0)
        own_weights = weights + (image * 2 * taps).to(tl.int64) * size + o
        source = tl.load(addresses + image).to(tl.pointer_type(tl.uint8))
        plane = tl.load(plane_sizes + image)
        line = (top + r).to(tl.int64)[:, None] * row_step + left * column_step
        target = narrow + ((tl.load(begins + image) + r)[:, None] * size + o[None, :]) * 3
        for channel in tl.static_range(3):
            total = tl.full([block_rows, block], 2097152, tl.int32)  # a half
            for tap in range(taps):
                column = first + tap
                mask = (r < height)[:, None] & ((o < size) & (column < width))[None, :]
                weight = tl.load(own_weights + tap * size, mask=o < size, other=0)
                place = channel * plane + line + column[None, :] * column_step
                pixel = tl.load(source + place, mask=mask, other=0)
                total += weight[None, :] * pixel.to(tl.int32)
            tl.store(target + channel, _to_byte(total), mask=(r < height)[:, None] & (o < size)[None, :])


@triton.jit(do_not_specialize=["taps"])  # type: ignore[untyped-decorator]
def _columns_kernel(  # type: ignore[no-untyped-def]
    crops,
    begins,
    firsts,
    weights,
    narrow,
    images,
    size,
    taps,
    fields: tl.constexpr,
    block_rows: tl.constexpr,
    block: tl.constexpr,
):
    """Resize along the second axis: narrow [rows of all rectangles, size, 3] -> images [n, size, size, 3]."""
    image = tl.program_id(0)
    o = tl.program_id(1) * block_rows + tl.arange(0, block_rows)
    v = tl.program_id(2) * block + tl.arange(0, block)
    height = tl.load(crops + image * fields + 5)
    swapped = tl.load(crops + image * fields + 12) != 0
    first = tl.load(firsts + (image * 2 + 1) * size + o, mask=o < size, other=0)
    own_weights = weights + ((image * 2 + 1) * taps).to(tl.int64) * size + o
    begin = tl.load(begins + image)
    total = tl.full([block_rows, block], 2097152, tl.int32)
    for tap in range(taps):
        r = first + tap
        mask = ((o < size) & (r < height))[:, None] & (v < 3 * size)[None, :]
        weight = tl.load(own_weights + tap * size, mask=o < size, other=0)
        pixel = tl.load(narrow + (begin + r)[:, None] * (3 * size) + v[None, :], mask=mask, other=0)
        total += weight[:, None] * pixel.to(tl.int32)
    row_step, pixel_step = tl.where(swapped, 3, 3 * size), tl.where(swapped, 3 * size, 3)
    place = o[:, None] * row_step + (v // 3 * pixel_step + v % 3)[None, :]
    target = images + image.to(tl.int64) * (3 * size * size) + place
    tl.store(target, _to_byte(total), mask=(o < size)[:, None] & (v < 3 * size)[None, :])


def crop_batch(
    pixels: Sequence[Tensor],
    crops: CropParamsBatch,
    interpolation: Interpolation,
    images: Tensor,
    order: PassOrder = PILLOW_ORDER,
) -> None:
    """Write the crops of decoded images to `images`.

    Args:
        pixels: uint8 [3, height, width] of each image, contiguous.
        crops: at least as many crops, inside the images.
        images: uint8 [n, size, size, 3], contiguous, on the device of `pixels`.
        order: order of the passes; default: the installed PIL's.
    """
    device, count, size = images.device, len(pixels), images.shape[1]
    described = describe_crops(crops, np.array([image.shape[2] for image in pixels]), order)
    table, heights = _upload(described, device), described[:, 5].astype(np.int64)
    begins = _upload(np.cumsum(heights) - heights, device)
    addresses = _upload(np.array([image.data_ptr() for image in pixels]), device)
    planes = _upload(np.array([image.shape[1] * image.shape[2] for image in pixels]), device)
    taps = largest_taps(crops, count, interpolation)
    firsts = torch.empty(count, 2, size, dtype=torch.int32, device=device)
    weights = torch.empty(count, 2, taps, size, dtype=torch.int32, device=device)
    narrow = torch.empty(int(heights.sum()), size, 3, dtype=torch.uint8, device=device)
    blocks = triton.cdiv(size, BLOCK_OUTPUTS)
    _weights_kernel[(count, 2, blocks)](
        *(table, firsts, weights, size, taps, FIELDS, interpolation == "bicubic", BLOCK_OUTPUTS), num_warps=4
    )
    _rows_kernel[(count, triton.cdiv(int(heights.max()), BLOCK_ROWS), blocks)](
        *(addresses, planes, table, begins, firsts, weights, narrow, size, taps, FIELDS, BLOCK_ROWS, BLOCK_OUTPUTS),
        num_warps=4,
    )
    _columns_kernel[(count, triton.cdiv(size, BLOCK_ROWS), triton.cdiv(3 * size, BLOCK_OUTPUTS))](
        *(table, begins, firsts, weights, narrow, images, size, taps, FIELDS, BLOCK_ROWS, BLOCK_OUTPUTS), num_warps=4
    )


def describe_crops(crops: CropParamsBatch, widths: npt.NDArray[np.int64], order: PassOrder) -> npt.NDArray[np.int32]:
    """Return the table of crops, int32 [n, FIELDS], of images with these `widths`, pixels [n]."""
    count = len(widths)
    names = ("left", "top", "width", "height", "out_width", "out_height", "out_left", "out_top")
    plain, flip = [getattr(crops, name)[:count] for name in names], crops.flip[:count].astype(np.int64)
    left, top, width, height, out_width, out_height, out_left, out_top = plain
    lost_columns, lost_rows = width - out_width, height - out_height
    saves = lost_rows > 2 * lost_columns if order == "fewest values first" else height > VERY_HIGH * width
    swapped = (lost_columns != 0) & (lost_rows > 0) & saves
    one, zero = np.ones(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    rows_first = [widths, one, *plain, flip, zero, zero]
    swapped_pairs = [top, left, height, width, out_height, out_width, out_top, out_left]
    columns_first = [one, widths, *swapped_pairs, zero, flip, one]
    table = np.where(swapped, np.stack(columns_first), np.stack(rows_first)).T
    return np.ascontiguousarray(table, dtype=np.int32)


def largest_taps(crops: CropParamsBatch, count: int, interpolation: Interpolation) -> int:
    """Return the most weights of an output of the first `count` crops, on either axis."""
    scales = [crops.width[:count] / crops.out_width[:count], crops.height[:count] / crops.out_height[:count]]
    shrink = max(1.0, float(np.max(scales)))
    return 2 * int(np.ceil(SUPPORT[interpolation] * shrink)) + 1


def _upload(values: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Return `values` on the device, by a copy that the host waits for only where memory cannot be pinned."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
