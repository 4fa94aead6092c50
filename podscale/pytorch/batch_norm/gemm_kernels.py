"""Triton kernels of 1x1 convolutions on images in NHWC order, with the batch norms around them folded in.

A 1x1 convolution is a product of matrices, [pixels, inputs] x [inputs, outputs]. Each kernel also does the work of a
batch norm on values that it holds anyway, which saves passes over the images:

- forward: normalises and activates its input while it loads it, or computes and writes the sum of a block; it writes
  the moments of its rounded output.
- data gradient: masks its output by the ReLU before the convolution, and writes the sums for that batch norm's
  gradient.
- weight gradient: normalises and activates its input again.

Products are accumulated in fp32 and rounded once. A program computes one tile; tiles divide the channels. Programs of
the same rows are neighbours, so that they share these rows in the L2 cache. Sums of a tile are in registers, those of
many tiles are merged by a second kernel to the chunks of `fused_kernels`, all in a fixed order. So are the parts of the
weight gradient, which is split over rows.

With `descriptors`, the factors of a product and its result are tensor descriptors of matrices, whose tiles the tensor
memory accelerator (TMA) moves, from compute capability 9 on. From 10 on, warps of their own load them. The images must
not be strided then. The results have the same bits.
"""

import triton
import triton.language as tl

from podscale.pytorch.batch_norm import fused_kernels


@triton.jit
def _activate(value, scale, shift):
    """Return max(0, value * scale + shift), rounded to the dtype of `value`; NaN passes."""
    result = value.to(tl.float32) * scale + shift
    return tl.where(result <= 0.0, 0.0, result).to(value.dtype)


@triton.jit
def _strided_rows(r, height, width, full_height, full_width, stride: tl.constexpr):
    """Return the rows, int64, of the pixels in the full images that strided images of [height, width] take."""
    if stride == 1:
        return r.to(tl.int64)
    line = r // width
    pixel = (line // height * full_height + line % height * stride).to(tl.int64) * full_width
    return pixel + r % width * stride


@triton.jit
def _product(
    x,
    weight,
    scale,
    shift,
    shortcut,
    activated,
    bits,
    x_rows,
    row_mask,
    write_mask,
    first_row,
    first_output,
    inputs,
    outputs,
    activation: tl.constexpr,
    transposed: tl.constexpr,
    descriptors: tl.constexpr,
    block_rows: tl.constexpr,
    block_inputs: tl.constexpr,
    block_outputs: tl.constexpr,
):
    """Return a tile of x @ weight, fp32. `weight` is [inputs, outputs], or `transposed` [outputs, inputs].

    The activation of x is 0: none, 1: batch norm and ReLU, 2: the same with the shortcut added, which is written with
    its bits in the rows of `write_mask`.
    """
    n = first_output + tl.arange(0, block_outputs)
    total = tl.zeros([block_rows, block_outputs], tl.float32)
    # A sum also stores in the loop, which warps that only load cannot.
    for start in tl.range(0, inputs, block_inputs, warp_specialize=descriptors and activation != 2):
        k = start + tl.arange(0, block_inputs)
        if descriptors:
            a = x.load([first_row, start])
        else:
            a = tl.load(x + x_rows[:, None] * inputs + k[None, :], mask=row_mask[:, None], other=0.0)
        if activation == 1:
            a = _activate(a, tl.load(scale + k)[None, :], tl.load(shift + k)[None, :])
        if activation == 2:
            x_at = x_rows[:, None] * inputs + k[None, :]
            value = a.to(tl.float32) * tl.load(scale + k)[None, :] + tl.load(shift + k)[None, :]
            value += tl.load(shortcut + x_at, mask=row_mask[:, None], other=0.0).to(tl.float32)
            value = tl.where(value <= 0.0, 0.0, value)
            a = value.to(a.dtype)
            tl.store(activated + x_at, a, mask=write_mask[:, None])
            packed = fused_kernels.pack_mask(value, block_rows, block_inputs)
            byte = start // 8 + tl.arange(0, block_inputs // 8)
            bits_at = x_rows[:, None] * (inputs // 8) + byte[None, :]
            tl.store(bits + bits_at, packed, mask=write_mask[:, None])
        if descriptors:
            b = weight.load([first_output, start]).T if transposed else weight.load([start, first_output])
        else:
            at = n[None, :] * inputs + k[:, None] if transposed else k[:, None] * outputs + n[None, :]
            b = tl.load(weight + at)
        total = tl.dot(a, b, total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["rows"])
def _gemm_forward_kernel(
    x,
    weight,
    scale,
    shift,
    shortcut,
    activated,
    bits,
    y,
    means,
    squares,
    rows,
    inputs,
    outputs,
    columns,
    height,
    width,
    full_height,
    full_width,
    activation: tl.constexpr,
    stride: tl.constexpr,
    descriptors: tl.constexpr,
    block_rows: tl.constexpr,
    block_inputs: tl.constexpr,
    block_outputs: tl.constexpr,
):
    """Write a tile of the convolution, with the mean and the sum of squared deviations of what is written."""
    part = tl.program_id(0) // columns
    column = tl.program_id(0) % columns
    n = column * block_outputs + tl.arange(0, block_outputs)
    r = part * block_rows + tl.arange(0, block_rows)
    x_rows = _strided_rows(r, height, width, full_height, full_width, stride)
    total = _product(
        *(x, weight, scale, shift, shortcut, activated, bits, x_rows, r < rows, r < tl.where(column == 0, rows, 0)),
        *(part * block_rows, column * block_outputs, inputs, outputs),
        activation=activation,
        transposed=True,
        descriptors=descriptors,
        block_rows=block_rows,
        block_inputs=block_inputs,
        block_outputs=block_outputs,
    )
    mask = (r < rows)[:, None]
    rounded = total.to(y.dtype if descriptors else y.dtype.element_ty)
    if descriptors:
        y.store([part * block_rows, column * block_outputs], rounded)
    else:
        tl.store(y + r.to(tl.int64)[:, None] * outputs + n[None, :], rounded, mask=mask)
    value = rounded.to(tl.float32)
    mean = tl.sum(tl.where(mask, value, 0.0), 0) / tl.minimum(block_rows, rows - part * block_rows).to(tl.float32)
    difference = tl.where(mask, value - mean[None, :], 0.0)
    tl.store(means + part * outputs + n, mean)
    tl.store(squares + part * outputs + n, tl.sum(difference * difference, 0))


@triton.jit(do_not_specialize=["rows"])
def _gemm_data_gradient_kernel(
    gradient,
    weight,
    second_gradient,
    x,
    bits,
    mean,
    scale,
    shift,
    dx,
    sums,
    products,
    rows,
    inputs,
    outputs,
    columns,
    height,
    width,
    full_height,
    full_width,
    relu: tl.constexpr,
    stride: tl.constexpr,
    second_stride: tl.constexpr,
    descriptors: tl.constexpr,
    block_rows: tl.constexpr,
    block_inputs: tl.constexpr,
    block_outputs: tl.constexpr,
):
    """Write a tile of the gradient of a convolution's input, masked, and its sums: g and g * (x - mean).

    `inputs` and `outputs` are those of this product, that is, the convolution's outputs and inputs. The second
    gradient is added before the mask if `second_stride` is not 0. It has only the pixels that a convolution of that
    stride takes.
    """
    part = tl.program_id(0) // columns
    column = tl.program_id(0) % columns
    n = column * block_outputs + tl.arange(0, block_outputs)
    r = part * block_rows + tl.arange(0, block_rows)
    g = _product(
        *(gradient, weight, scale, shift, gradient, gradient, gradient, r.to(tl.int64), r < rows, r < rows),
        *(part * block_rows, column * block_outputs, inputs, outputs),
        activation=0,
        transposed=False,
        descriptors=descriptors,
        block_rows=block_rows,
        block_inputs=block_inputs,
        block_outputs=block_outputs,
    )
    mask = (r < rows)[:, None]
    dx_rows = _strided_rows(r, height, width, full_height, full_width, stride)
    offsets = dx_rows[:, None] * outputs + n[None, :]
    if second_stride == 1:
        g += tl.load(second_gradient + offsets, mask=mask, other=0.0).to(tl.float32)
    if second_stride > 1:
        column_of_image, line = r % full_width, r // full_width
        image, row_of_image = line // full_height, line % full_height
        taken = (column_of_image % second_stride == 0) & (row_of_image % second_stride == 0)
        at = (image * height + row_of_image // second_stride).to(tl.int64) * width + column_of_image // second_stride
        second = second_gradient + at[:, None] * outputs + n[None, :]
        g += tl.load(second, mask=mask & taken[:, None], other=0.0).to(tl.float32)
    if relu != 0:
        value = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    if relu == 1:
        a, b = tl.load(scale + n)[None, :], tl.load(shift + n)[None, :]
        g = tl.where(value * a + b <= 0.0, 0.0, g)
    if relu == 2:
        byte = column * (block_outputs // 8) + tl.arange(0, block_outputs // 8)
        packed = tl.load(bits + r.to(tl.int64)[:, None] * (outputs // 8) + byte[None, :], mask=mask, other=0)
        g = fused_kernels.apply_mask(g, packed, block_rows, block_outputs)
    rounded = g.to(dx.dtype if descriptors else dx.dtype.element_ty)
    if descriptors:
        dx.store([part * block_rows, column * block_outputs], rounded)
    else:
        tl.store(dx + offsets, rounded, mask=mask)
    if relu != 0:
        g = rounded.to(tl.float32)  # 0 in rows past the end, whose gradients were loaded as 0
        tl.store(sums + part * outputs + n, tl.sum(g, 0))
        tl.store(products + part * outputs + n, tl.sum(g * (value - tl.load(mean + n)[None, :]), 0))


@triton.jit(do_not_specialize=["rows", "tiles"])
def _gemm_merge_kernel(
    first_in,
    second_in,
    first_out,
    second_out,
    rows,
    tiles,
    channels,
    moments: tl.constexpr,
    tile_rows: tl.constexpr,
    block_tiles: tl.constexpr,
    block_channels: tl.constexpr,
):
    """Write the sums of a group of tiles, or with `moments` their mean and sum of squared deviations (Chan 1979)."""
    c = tl.program_id(1) * block_channels + tl.arange(0, block_channels)
    t = tl.program_id(0) * block_tiles + tl.arange(0, block_tiles)
    mask = (t < tiles)[:, None] & (c < channels)[None, :]
    offsets = t[:, None] * channels + c[None, :]
    first = tl.load(first_in + offsets, mask=mask, other=0.0)
    second = tl.load(second_in + offsets, mask=mask, other=0.0)
    if moments:
        count = tl.where(t < tiles, tl.minimum(tile_rows, rows - t * tile_rows), 0).to(tl.float32)[:, None]
        total = tl.sum(first * count, 0) / tl.sum(count, 0)
        difference = tl.where(mask, first - total[None, :], 0.0)
        second += count * difference * difference
    else:
        total = tl.sum(first, 0)
    at = tl.program_id(0) * channels + c
    tl.store(first_out + at, total, mask=c < channels)
    tl.store(second_out + at, tl.sum(second, 0), mask=c < channels)


@triton.jit(do_not_specialize=["rows", "chunk"])
def _gemm_weight_gradient_kernel(
    gradient,
    x,
    scale,
    shift,
    partial,
    rows,
    inputs,
    outputs,
    chunk,
    columns,
    tiles,
    height,
    width,
    full_height,
    full_width,
    activated: tl.constexpr,
    stride: tl.constexpr,
    descriptors: tl.constexpr,
    block_rows: tl.constexpr,
    block_inputs: tl.constexpr,
    block_outputs: tl.constexpr,
):
    """Write a tile of the weight gradient, [outputs, inputs], over a chunk of rows."""
    part = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    k = tile % columns * block_inputs + tl.arange(0, block_inputs)
    n = tile // columns * block_outputs + tl.arange(0, block_outputs)
    first = part * chunk
    last = tl.minimum(first + chunk, rows)
    if activated:
        factor, offset = tl.load(scale + k)[None, :], tl.load(shift + k)[None, :]
    total = tl.zeros([block_outputs, block_inputs], tl.float32)
    for start in tl.range(first, last, block_rows, warp_specialize=descriptors):
        if descriptors:  # chunks are multiples of `block_rows`, and tiles past the end of the matrix have zeros
            g = gradient.load([start, tile // columns * block_outputs])
            a = x.load([start, tile % columns * block_inputs])
        else:
            r = start + tl.arange(0, block_rows)
            x_rows = _strided_rows(r, height, width, full_height, full_width, stride)
            mask = (r < last)[:, None]
            g = tl.load(gradient + r.to(tl.int64)[:, None] * outputs + n[None, :], mask=mask, other=0.0)
            a = tl.load(x + x_rows[:, None] * inputs + k[None, :], mask=mask, other=0.0)
        if activated:
            a = _activate(a, factor, offset)  # rows past the end are not 0 now, but those of the gradient are
        total = tl.dot(tl.trans(g), a, total, input_precision="ieee")
    tl.store(partial + part.to(tl.int64) * outputs * inputs + n[:, None] * inputs + k[None, :], total)


@triton.jit
def _gemm_add_splits_kernel(partial, out, elements, splits, block: tl.constexpr):
    """Write the sum of all splits."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    total = tl.zeros([block], tl.float32)
    source = partial + at
    for _ in range(splits):
        total += tl.load(source, mask=at < elements, other=0.0)
        source += elements
    tl.store(out + at, total.to(out.dtype.element_ty), mask=at < elements)
