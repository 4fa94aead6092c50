"""Triton kernels of batch norm with ReLU, sum of a residual block, and their gradients, on images in NHWC order.

Batch norm is bound by memory, so each kernel reads and writes as little as it can:

- moments: reads x.
- normalise: reads x (and the shortcut), writes the output; the signs of a block's output become one bit each.
- gradient sums: reads the gradient of the output (of both consumers, if a block's output has two) and x; the mask of
  the ReLU is computed again from x, or read as bits. In a block it writes the masked sum, the shortcut's gradient.
- input gradient: reads the gradient and x, writes the input's gradient.

Images are [rows, channels] here, a row for each pixel. Sums are in a fixed order: a program adds up a chunk of rows in
fp32, and a second kernel adds up the chunks in fp64, so results do not depend on timing. Moments of a chunk are of the
differences to the mean of its first rows, so that no large sums are subtracted. Comparisons let NaN through, because
the loss must show it.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows", "chunk"])
def _moments_kernel(x, means, squares, rows, channels, chunk, block_rows: tl.constexpr, block_channels: tl.constexpr):
    """Write the mean and the sum of squared deviations of one chunk."""
    part = tl.program_id(0)
    c = tl.program_id(1) * block_channels + tl.arange(0, block_channels)
    r = tl.arange(0, block_rows)
    first = part * chunk
    last = tl.minimum(first + chunk, rows)
    within = c[None, :] < channels
    offsets = (first + r).to(tl.int64)[:, None] * channels + c[None, :]
    tile = tl.load(x + offsets, mask=within & ((first + r) < last)[:, None], other=0.0).to(tl.float32)
    shift = tl.sum(tile, 0) / tl.minimum(block_rows, last - first).to(tl.float32)
    sums = tl.zeros([block_rows, block_channels], tl.float32)
    squared = tl.zeros([block_rows, block_channels], tl.float32)
    for start in range(first, last, block_rows):
        mask = within & ((start + r) < last)[:, None]
        offsets = (start + r).to(tl.int64)[:, None] * channels + c[None, :]
        value = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
        difference = tl.where(mask, value - shift[None, :], 0.0)
        sums += difference
        squared += difference * difference
    count = (last - first).to(tl.float32)
    total = tl.sum(sums, 0)
    tl.store(means + part * channels + c, shift + total / count, mask=c < channels)
    tl.store(squares + part * channels + c, tl.sum(squared, 0) - total * total / count, mask=c < channels)


@triton.jit(do_not_specialize=["rows", "chunk", "parts"])
def _finish_moments_kernel(
    means,
    squares,
    weight,
    bias,
    running_mean,
    running_var,
    out,
    rows,
    channels,
    chunk,
    parts,
    eps,
    momentum,
    affine: tl.constexpr,
    block_parts: tl.constexpr,
    block_channels: tl.constexpr,
):
    """Write mean and variance [channels] to `out`; if `affine` also 1 / std, scale and shift, and move the averages."""
    c = tl.program_id(0) * block_channels + tl.arange(0, block_channels)
    p = tl.arange(0, block_parts)
    first_moment = tl.zeros([block_parts, block_channels], tl.float64)
    second_moment = tl.zeros([block_parts, block_channels], tl.float64)
    for start in range(0, parts, block_parts):
        part = start + p
        mask = (part < parts)[:, None] & (c < channels)[None, :]
        offsets = part[:, None] * channels + c[None, :]
        mean = tl.load(means + offsets, mask=mask, other=0.0).to(tl.float64)
        square = tl.load(squares + offsets, mask=mask, other=0.0).to(tl.float64)
        count = tl.minimum(chunk, rows - part * chunk).to(tl.float64)[:, None]
        first_moment += tl.where(mask, count * mean, 0.0)
        second_moment += tl.where(mask, square + count * mean * mean, 0.0)
    total = rows.to(tl.float64)
    exact_mean = tl.sum(first_moment, 0) / total
    exact_var = tl.sum(second_moment, 0) / total - exact_mean * exact_mean
    exact_var = tl.where(exact_var < 0.0, 0.0, exact_var)
    inside = c < channels
    tl.store(out + c, exact_mean.to(tl.float32), mask=inside)
    tl.store(out + channels + c, exact_var.to(tl.float32), mask=inside)
    if affine:
        invstd = 1.0 / tl.sqrt(exact_var + eps)
        scale = tl.load(weight + c, mask=inside, other=0.0).to(tl.float64) * invstd
        shift = tl.load(bias + c, mask=inside, other=0.0).to(tl.float64) - exact_mean * scale
        tl.store(out + 2 * channels + c, invstd.to(tl.float32), mask=inside)
        tl.store(out + 3 * channels + c, scale.to(tl.float32), mask=inside)
        tl.store(out + 4 * channels + c, shift.to(tl.float32), mask=inside)
        unbiased = (exact_var * (total / tl.maximum(total - 1.0, 1.0))).to(tl.float32)
        average = tl.load(running_mean + c, mask=inside, other=0.0)
        tl.store(running_mean + c, average + momentum * (exact_mean.to(tl.float32) - average), mask=inside)
        average = tl.load(running_var + c, mask=inside, other=0.0)
        tl.store(running_var + c, average + momentum * (unbiased - average), mask=inside)


@triton.jit
def pack_mask(value, block_rows: tl.constexpr, block_channels: tl.constexpr):
    """Return a bit for each value that is not 0, uint8 [block_rows, block_channels / 8]."""
    eight = tl.reshape(tl.where(value == 0.0, 0, 1), [block_rows, block_channels // 8, 8])
    return tl.sum(eight << tl.arange(0, 8)[None, None, :], 2).to(tl.uint8)


@triton.jit
def apply_mask(g, packed, block_rows: tl.constexpr, block_channels: tl.constexpr):
    """Return `g` [block_rows, block_channels], or 0 if the bit in `packed` by `pack_mask` is 0."""
    alive = (packed.to(tl.int32)[:, :, None] >> tl.arange(0, 8)[None, None, :]) & 1
    return tl.where(tl.reshape(alive, [block_rows, block_channels]) == 0, 0.0, g)


@triton.jit(do_not_specialize=["rows"])
def _normalise_kernel(
    x,
    scale,
    shift,
    shortcut,
    y,
    bits,
    rows,
    channels,
    columns,
    relu: tl.constexpr,
    block_rows: tl.constexpr,
    block_channels: tl.constexpr,
):
    """Write x * scale + shift, plus the shortcut if the mask is of bits, through the ReLU unless there is none."""
    c = tl.program_id(0) % columns * block_channels + tl.arange(0, block_channels)
    r = tl.program_id(0) // columns * block_rows + tl.arange(0, block_rows)
    mask = (r < rows)[:, None] & (c < channels)[None, :]
    offsets = r.to(tl.int64)[:, None] * channels + c[None, :]
    a = tl.load(scale + c, mask=c < channels, other=0.0)
    b = tl.load(shift + c, mask=c < channels, other=0.0)
    value = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32) * a[None, :] + b[None, :]
    if relu == 2:
        value += tl.load(shortcut + offsets, mask=mask, other=0.0).to(tl.float32)
    if relu != 0:
        value = tl.where(value <= 0.0, 0.0, value)
    tl.store(y + offsets, value.to(y.dtype.element_ty), mask=mask)
    if relu == 2:
        packed = pack_mask(value, block_rows, block_channels)
        byte = tl.program_id(0) % columns * (block_channels // 8) + tl.arange(0, block_channels // 8)
        at = r.to(tl.int64)[:, None] * (channels // 8) + byte[None, :]
        tl.store(bits + at, packed, mask=(r < rows)[:, None] & (byte < channels // 8)[None, :])


@triton.jit(do_not_specialize=["rows", "chunk"])
def _gradient_sums_kernel(
    gradient,
    second_gradient,
    x,
    bits,
    mean,
    scale,
    shift,
    masked,
    sums,
    products,
    rows,
    channels,
    chunk,
    relu: tl.constexpr,
    has_second: tl.constexpr,
    block_rows: tl.constexpr,
    block_channels: tl.constexpr,
):
    """Write the sums of g and g * (x - mean) of one chunk, g being the masked gradient; in a block also g itself."""
    part = tl.program_id(0)
    c = tl.program_id(1) * block_channels + tl.arange(0, block_channels)
    r = tl.arange(0, block_rows)
    first = part * chunk
    last = tl.minimum(first + chunk, rows)
    centre = tl.load(mean + c, mask=c < channels, other=0.0)
    if relu == 1:
        a = tl.load(scale + c, mask=c < channels, other=0.0)
        b = tl.load(shift + c, mask=c < channels, other=0.0)
    total = tl.zeros([block_rows, block_channels], tl.float32)
    product = tl.zeros([block_rows, block_channels], tl.float32)
    for start in range(first, last, block_rows):
        mask = (c < channels)[None, :] & ((start + r) < last)[:, None]
        offsets = (start + r).to(tl.int64)[:, None] * channels + c[None, :]
        value = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(gradient + offsets, mask=mask, other=0.0).to(tl.float32)
        if has_second:
            g += tl.load(second_gradient + offsets, mask=mask, other=0.0).to(tl.float32)
        if relu == 1:
            g = tl.where(value * a[None, :] + b[None, :] <= 0.0, 0.0, g)
        if relu == 2:
            byte = tl.program_id(1) * (block_channels // 8) + tl.arange(0, block_channels // 8)
            at = (start + r).to(tl.int64)[:, None] * (channels // 8) + byte[None, :]
            inside = (byte < channels // 8)[None, :] & ((start + r) < last)[:, None]
            packed = tl.load(bits + at, mask=inside, other=0)
            rounded = apply_mask(g, packed, block_rows, block_channels).to(masked.dtype.element_ty)
            tl.store(masked + offsets, rounded, mask=mask)
            g = rounded.to(tl.float32)
        total += g
        product += g * (value - centre[None, :])
    tl.store(sums + part * channels + c, tl.sum(total, 0), mask=c < channels)
    tl.store(products + part * channels + c, tl.sum(product, 0), mask=c < channels)


@triton.jit(do_not_specialize=["rows", "parts"])
def _finish_gradient_sums_kernel(
    sums,
    products,
    invstd,
    scale,
    out,
    rows,
    channels,
    parts,
    local: tl.constexpr,
    block_parts: tl.constexpr,
    block_channels: tl.constexpr,
):
    """Write sum(g) and sum(g * (x - mean)) to `out`; if `local` instead the gradients of bias and weight, and the input
    gradient's factor of x - mean and its constant."""
    c = tl.program_id(0) * block_channels + tl.arange(0, block_channels)
    p = tl.arange(0, block_parts)
    total = tl.zeros([block_parts, block_channels], tl.float64)
    product = tl.zeros([block_parts, block_channels], tl.float64)
    for start in range(0, parts, block_parts):
        part = start + p
        mask = (part < parts)[:, None] & (c < channels)[None, :]
        offsets = part[:, None] * channels + c[None, :]
        total += tl.load(sums + offsets, mask=mask, other=0.0).to(tl.float64)
        product += tl.load(products + offsets, mask=mask, other=0.0).to(tl.float64)
    inside = c < channels
    sum_g, sum_product = tl.sum(total, 0), tl.sum(product, 0)
    tl.store(out + c, sum_g.to(tl.float32), mask=inside)
    if local:
        inverse = tl.load(invstd + c, mask=inside, other=0.0).to(tl.float64)
        factor = tl.load(scale + c, mask=inside, other=0.0).to(tl.float64) / rows.to(tl.float64)
        tl.store(out + channels + c, (sum_product * inverse).to(tl.float32), mask=inside)
        tl.store(out + 2 * channels + c, (-factor * inverse * inverse * sum_product).to(tl.float32), mask=inside)
        tl.store(out + 3 * channels + c, (-factor * sum_g).to(tl.float32), mask=inside)
    else:
        tl.store(out + channels + c, sum_product.to(tl.float32), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _input_gradient_kernel(
    gradient,
    x,
    mean,
    scale,
    shift,
    slope,
    constant,
    dx,
    rows,
    channels,
    columns,
    relu: tl.constexpr,
    block_rows: tl.constexpr,
    block_channels: tl.constexpr,
):
    """Write scale * g + slope * (x - mean) + constant."""
    c = tl.program_id(0) % columns * block_channels + tl.arange(0, block_channels)
    r = tl.program_id(0) // columns * block_rows + tl.arange(0, block_rows)
    mask = (r < rows)[:, None] & (c < channels)[None, :]
    offsets = r.to(tl.int64)[:, None] * channels + c[None, :]
    inside = c < channels
    a = tl.load(scale + c, mask=inside, other=0.0)
    value = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(gradient + offsets, mask=mask, other=0.0).to(tl.float32)
    if relu == 1:
        b = tl.load(shift + c, mask=inside, other=0.0)
        g = tl.where(value * a[None, :] + b[None, :] <= 0.0, 0.0, g)
    centre = tl.load(mean + c, mask=inside, other=0.0)
    k = tl.load(slope + c, mask=inside, other=0.0)
    d = tl.load(constant + c, mask=inside, other=0.0)
    result = a[None, :] * g + (k[None, :] * (value - centre[None, :]) + d[None, :])
    tl.store(dx + offsets, result.to(dx.dtype.element_ty), mask=mask)
