"""Four operations of batch norm over images: moments, normalisation, sums of the gradient, and the input's gradient.

They run torch's own kernels, which support both memory formats and mixed dtypes. On CUDA they are the kernels of
SyncBatchNorm. A CPU has none: there, batch norm in evaluation mode does the same work, given the statistics, and serves
as an affine map per channel. Under torch.compile they are plain operations, which the compiler fuses with others.
Scales and moments are fp32 (fp64 for fp64 images), whatever the dtype of the images.
"""

from typing import cast

import torch
from torch import Tensor

MOMENT_BLOCK_VALUES = 2**20
"""Values in one block of the CPU's moments. A block stays in the cache between its two passes. It also bounds the error
of the channels-last kernel, which has one fp32 sum over all rows (2e-5 of the variance at 100,000 rows)."""

COUNT_PARTS = 64
"""Counts in which the number of values of a channel is passed to torch's CUDA kernel: up to 2^37 values in all."""

FAR_DEVIATIONS = 100.0
"""Standard deviations from zero beyond which, on a CPU, the mean is subtracted and moments are computed again."""

REDUCED_DIMS = (0, 2, 3)


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance [channels] of images `x` [n, channels, height, width], fp32 or fp64."""
    if torch.compiler.is_compiling():
        var, mean = torch.var_mean(x.to(statistics_dtype(x)), dim=REDUCED_DIMS, correction=0)
        return mean, var
    if x.is_cuda:
        return torch.batch_norm_update_stats(x, None, None, 0.0)
    mean, var = _block_moments(x)
    if bool((mean.square() > FAR_DEVIATIONS**2 * var).any()):
        offset = mean.to(statistics_dtype(x))
        difference, var = _block_moments(x - _per_channel(offset))
        mean = offset + difference
    return mean, var


def normalise(x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return (x - mean) * invstd * weight + bias of images `x`; all others are [channels]."""
    if torch.compiler.is_compiling():
        y = (x.to(mean.dtype) - _per_channel(mean)) * _per_channel(invstd * weight) + _per_channel(bias)
        return _cast(y, x.dtype)
    if x.is_cuda:
        return torch.batch_norm_elemt(x, weight, bias, mean, invstd, 0.0)
    return _affine(x, mean, weight * invstd, bias)


def gradient_sums(dy: Tensor, x: Tensor, mean: Tensor, invstd: Tensor) -> tuple[Tensor, Tensor]:
    """Return sum(dy) and sum(dy * (x - mean)) [channels]; `dy` and `x` are images, `mean` and `invstd` [channels]."""
    if torch.compiler.is_compiling():
        exact = dy.to(mean.dtype)
        return exact.sum(REDUCED_DIMS), (exact * (x.to(mean.dtype) - _per_channel(mean))).sum(REDUCED_DIMS)
    if x.is_cuda:
        weight = invstd  # only its dtype is used, which must be that of the parameters
        sum_dy, sum_dy_xmu, _, _ = torch.batch_norm_backward_reduce(dy, x, mean, invstd, weight, True, False, False)
        return sum_dy, sum_dy_xmu
    one = torch.ones_like(mean)
    _, sum_dy_xmu, sum_dy = torch.ops.aten.native_batch_norm_backward(
        dy, x, one, mean, one, None, None, False, 0.0, [False, True, True]
    )
    return cast(Tensor, sum_dy), cast(Tensor, sum_dy_xmu)


def input_gradient(
    dy: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor, sums: Tensor, count: Tensor
) -> Tensor:
    """Return weight * invstd * (dy - sums[0] / count - (x - mean) * invstd^2 * sums[1] / count) in the dtype of x.

    Args:
        sums: those of `gradient_sums` over the group, [2, channels].
        count: values of a channel in the group, fp64 [1].
    """
    if x.is_cuda and not torch.compiler.is_compiling():
        return torch.batch_norm_backward_elemt(dy, x, mean, invstd, weight, sums[0], sums[1], int32_counts(count))
    mean_dy, mean_dy_xmu = sums / count.to(sums.dtype)
    if torch.compiler.is_compiling():
        xmu = x.to(mean.dtype) - _per_channel(mean)
        dx = dy.to(mean.dtype) - _per_channel(mean_dy) - xmu * _per_channel(invstd * invstd * mean_dy_xmu)
        return _cast(dx * _per_channel(weight * invstd), x.dtype)
    scale = weight * invstd
    dx = _affine(x.to(scale.dtype), mean, -scale * invstd * invstd * mean_dy_xmu, -scale * mean_dy)
    return dx.addcmul_(dy.to(scale.dtype), _per_channel(scale)).to(x.dtype)


def int32_counts(count: Tensor) -> Tensor:
    """Return `count`, fp64 [1], as the int32 counts [COUNT_PARTS] of torch's kernel, which adds them in int64.

    One int32 overflows at 2^31 values of a channel, that is from 428 ranks of 400 images in the stem of ResNet-50.
    """
    offsets = torch.arange(COUNT_PARTS, dtype=count.dtype, device=count.device)
    return offsets.add_(count).div_(COUNT_PARTS).to(torch.int32)  # floor((count + i) / n), whose sum over i is count


def statistics_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of statistics of `x`: fp32, or fp64 for fp64 images."""
    return torch.promote_types(x.dtype, torch.float32)


def memory_order(x: Tensor) -> torch.memory_format:
    """Return channels_last if `x` is in this format, else contiguous."""
    is_last = x.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if is_last else torch.contiguous_format


def _block_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return fp64 moments, combined from those of blocks as `combine_moments` does with ranks."""
    scratch = torch.zeros(2, x.shape[1], dtype=statistics_dtype(x))  # its dtype is that of the kernel's results
    blocks = x.split(max(1, MOMENT_BLOCK_VALUES // max(1, x[0].numel())))
    moments = [torch.stack(torch.batch_norm_update_stats(block, scratch[0], scratch[1], 0.1)) for block in blocks]
    fractions = torch.tensor([len(block) / len(x) for block in blocks], dtype=torch.float64)
    means, variances = torch.stack(moments).double().unbind(1)
    mean = fractions @ means
    return mean, fractions @ (variances + (means - mean).square_())


def _affine(x: Tensor, mean: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Return (x - mean) * scale + shift in one pass, on a CPU."""
    return torch.native_batch_norm(x, scale, shift, mean, torch.ones_like(mean), False, 0.0, 0.0)[0]


def _cast(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `values` in `dtype`, without an operation if they have it.

    In Dynamo of torch 2.11, an output of an autograd function that a cast to its own dtype returns has no gradient: all
    gradients of the function were zero, on a CPU and on an H200.
    """
    return values if values.dtype == dtype else values.to(dtype)


def _per_channel(values: Tensor) -> Tensor:
    return values.view(1, -1, 1, 1)
