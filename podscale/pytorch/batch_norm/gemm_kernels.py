"""Triton kernels of 1x1 convolutions on images in NHWC order, with the batch norms around them folded in.

A 1x1 convolution is a product of matrices, [pixels, inputs] x [inputs, outputs]. Each kernel also does the work of a
batch norm on values that it holds anyway, which saves passes over the images:

- forward: normalises and activates its input while it loads it, and writes the moments of its rounded output.
- data gradient: masks its output by the ReLU before the convolution, and writes the sums for that batch norm's gradient.
- weight gradient: normalises and activates its input again.

Products are accumulated in fp32 and rounded once. A program computes one column of tiles of a chunk of rows. Programs of
the same chunk are neighbours, so that they share its rows in the L2 cache. Sums have the form of `fused_kernels`: a row
for each chunk, added up in fp64 in a fixed order. The weight gradient is split over rows; fp32 sums of the splits are
added in a fixed order too.
"""

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def _activate(value, scale, shift):  # type: ignore[no-untyped-def]
    """Return max(0, value * scale + shift), rounded to the dtype of `value`; NaN passes."""
    result = value.to(tl.float32) * scale + shift
    return tl.where(result <= 0.0, 0.0, result).to(value.dtype)


@triton.jit  # type: ignore[untyped-decorator]
def _strided_rows(r, height, width, full_height, full_width, stride: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the rows, int64, of the pixels in the full images that strided images of [height, width] take."""
    if stride == 1:
        return r.to(tl.int64)
    line = r // width
    pixel = (line // height * full_height + line % height * stride).to(tl.int64) * full_width
    return pixel + r % width * stride


@triton.jit  # type: ignore[untyped-decorator]
def _product(  # type: ignore[no-untyped-def]
    x,
    weight,
    scale,
    shift,
    x_rows,
    row_mask,
    n,
    inputs,
    outputs,
    activated: tl.constexpr,
    transposed: tl.constexpr,
    block_rows: tl.constexpr,
    block_inputs: tl.constexpr,
    block_outputs: tl.constexpr,
):
    """Return a tile of x @ weight, fp32. `weight` is [inputs, outputs], or `transposed` [outputs, inputs]."""
    total = tl.zeros([block_rows, block_outputs], tl.float32)
    for start in range(0, inputs, block_inputs):
        k = start + tl.arange(0, block_inputs)
        mask = row_mask[:, None] & (k < inputs)[None, :]
        a = tl.load(x + x_rows[:, None] * inputs + k[None, :], mask=mask, other=0.0)
        if activated:
            factor = tl.load(scale + k, mask=k < inputs, other=0.0)
            offset = tl.load(shift + k, mask=k < inputs, other=0.0)
            a = _activate(a, factor[None, :], offset[None, :])
        at = n[None, :] * inputs + k[:, None] if transposed else k[:, None] * outputs + n[None, :]
        b = tl.load(weight + at, mask=(k < inputs)[:, None] & (n < outputs)[None, :], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["rows", "chunk"])  # type: ignore[untyped-decorator]
def _forward_kernel(  # type: ignore[no-untyped-def]
    x,
    weight,
    scale,
    shift,
    y,
    means,
    squares,
    rows,
    inputs,
    outputs,
    chunk,
    columns,
    height,
    width,
    full_height,
    full_width,
    activated: tl.constexpr,
    stride: tl.constexpr,
    block_rows: tl.constexpr,
    block_inputs: tl.constexpr,
    block_outputs: tl.constexpr,
):
    """Write the convolution of a chunk of rows, with the mean and the sum of squared deviations of what is written."""
    part = tl.program_id(0) // columns
    n = tl.program_id(0) % columns * block_outputs + tl.arange(0, block_outputs)
    inside = n < outputs
    first = part * chunk
    last = tl.minimum(first + chunk, rows)
    mean = tl.zeros([block_outputs], tl.float32)
    square = tl.zeros([block_outputs], tl.float32)
    for start in range(first, last, block_rows):
        r = start + tl.arange(0, block_rows)
        x_rows = _strided_rows(r, height, width, full_height, full_width, stride)
        total = _product(
            x,
            weight,
            scale,
            shift,
            x_rows,
            r < last,
            n,
            inputs,
            outputs,
            activated,
            True,
            block_rows,
            block_inputs,
            block_outputs,
        )
        mask = (r < last)[:, None] & inside[None, :]
        rounded = total.to(y.dtype.element_ty)
        tl.store(y + r.to(tl.int64)[:, None] * outputs + n[None, :], rounded, mask=mask)
        # The moments of a tile are merged into those of the tiles before it (Chan 1979): no large sums are subtracted.
        value = tl.where(mask, rounded.to(tl.float32), 0.0)
        count = tl.minimum(block_rows, last - start).to(tl.float32)
        before = (start - first).to(tl.float32)
        tile_mean = tl.sum(value, 0) / count
        difference = tl.where(mask, value - tile_mean[None, :], 0.0)
        step = tile_mean - mean
        fraction = count / (before + count)
        mean += step * fraction
        square += tl.sum(difference * difference, 0) + step * step * (before * fraction)
    tl.store(means + part * outputs + n, mean, mask=inside)
    tl.store(squares + part * outputs + n, square, mask=inside)


@triton.jit(do_not_specialize=["rows", "chunk"])  # type: ignore[untyped-decorator]
def _data_gradient_kernel(  # type: ignore[no-untyped-def]
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
    chunk,
    columns,
    height,
    width,
    full_height,
    full_width,
    relu: tl.constexpr,
    stride: tl.constexpr,
    second_stride: tl.constexpr,
    block_rows: tl.constexpr,
    block_inputs: tl.constexpr,
    block_outputs: tl.constexpr,
):
    """Write the gradient of a convolution's input, masked, and its sums over a chunk of rows: g and g * (x - mean).

    `inputs` and `outputs` are those of this product, that is, the convolution's outputs and inputs. The second gradient
    is added before the mask if `second_stride` is not 0. It has only the pixels that a convolution of that stride takes.
    """
    part = tl.program_id(0) // columns
    column = tl.program_id(0) % columns
    n = column * block_outputs + tl.arange(0, block_outputs)
    inside = n < outputs
    first = part * chunk
    last = tl.minimum(first + chunk, rows)
    total = tl.zeros([block_outputs], tl.float32)
    product = tl.zeros([block_outputs], tl.float32)
    if relu != 0:
        centre = tl.load(mean + n, mask=inside, other=0.0)[None, :]
    if relu == 1:
        a = tl.load(scale + n, mask=inside, other=0.0)[None, :]
        b = tl.load(shift + n, mask=inside, other=0.0)[None, :]
    for start in range(first, last, block_rows):
        r = start + tl.arange(0, block_rows)
        g = _product(
            gradient,
            weight,
            scale,
            shift,
            r.to(tl.int64),
            r < last,
            n,
            inputs,
            outputs,
            False,
            False,
            block_rows,
            block_inputs,
            block_outputs,
        )
        mask = (r < last)[:, None] & inside[None, :]
        dx_rows = _strided_rows(r, height, width, full_height, full_width, stride)
        offsets = dx_rows[:, None] * outputs + n[None, :]
        if second_stride == 1:
            g += tl.load(second_gradient + offsets, mask=mask, other=0.0).to(tl.float32)
        if second_stride > 1:
            row, line = r % full_width, r // full_width
            image, row_of_image = line // full_height, line % full_height
            taken = (row % second_stride == 0) & (row_of_image % second_stride == 0)
            at = (image * height + row_of_image // second_stride).to(tl.int64) * width + row // second_stride
            second = second_gradient + at[:, None] * outputs + n[None, :]
            g += tl.load(second, mask=mask & taken[:, None], other=0.0).to(tl.float32)
        if relu != 0:
            value = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
        if relu == 1:
            g = tl.where(value * a + b <= 0.0, 0.0, g)
        if relu == 2:
            byte = column * (block_outputs // 8) + tl.arange(0, block_outputs // 8)
            bits_at = r.to(tl.int64)[:, None] * (outputs // 8) + byte[None, :]
            bits_mask = (r < last)[:, None] & (byte < outputs // 8)[None, :]
            packed = tl.load(bits + bits_at, mask=bits_mask, other=0).to(tl.int32)
            alive = (packed[:, :, None] >> tl.arange(0, 8)[None, None, :]) & 1
            g = tl.where(tl.reshape(alive, [block_rows, block_outputs]) == 0, 0.0, g)
        rounded = g.to(dx.dtype.element_ty)
        tl.store(dx + offsets, rounded, mask=mask)
        if relu != 0:
            g = tl.where(mask, rounded.to(tl.float32), 0.0)
            total += tl.sum(g, 0)
            product += tl.sum(g * (value - centre), 0)
    if relu != 0:
        tl.store(sums + part * outputs + n, total, mask=inside)
        tl.store(products + part * outputs + n, product, mask=inside)


@triton.jit(do_not_specialize=["rows", "chunk"])  # type: ignore[untyped-decorator]
def _weight_gradient_kernel(  # type: ignore[no-untyped-def]
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
        factor = tl.load(scale + k, mask=k < inputs, other=0.0)[None, :]
        offset = tl.load(shift + k, mask=k < inputs, other=0.0)[None, :]
    total = tl.zeros([block_outputs, block_inputs], tl.float32)
    for start in range(first, last, block_rows):
        r = start + tl.arange(0, block_rows)
        x_rows = _strided_rows(r, height, width, full_height, full_width, stride)
        at = r.to(tl.int64)[:, None] * outputs + n[None, :]
        g = tl.load(gradient + at, mask=(r < last)[:, None] & (n < outputs)[None, :], other=0.0)
        mask = (r < last)[:, None] & (k < inputs)[None, :]
        a = tl.load(x + x_rows[:, None] * inputs + k[None, :], mask=mask, other=0.0)
        if activated:
            a = _activate(a, factor, offset)  # rows past the end are not 0 now, but those of the gradient are
        total = tl.dot(tl.trans(g), a, total, input_precision="ieee")
    mask = (n < outputs)[:, None] & (k < inputs)[None, :]
    at = n[:, None] * inputs + k[None, :]
    tl.store(partial + part.to(tl.int64) * outputs * inputs + at, total, mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _add_splits_kernel(partial, out, elements, splits, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write the sum of all splits."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    total = tl.zeros([block], tl.float32)
    source = partial + at
    for _ in range(splits):
        total += tl.load(source, mask=at < elements, other=0.0)
        source += elements
    tl.store(out + at, total.to(out.dtype.element_ty), mask=at < elements)

