"""The four passes of batch norm over images with torch's own kernels, which know both memory orders and mixed dtypes.

On CUDA they are the kernels of SyncBatchNorm. On a CPU those do not exist; batch norm in evaluation mode with given
statistics does the same work there, also as a general affine map per channel. `scale` and the moments are fp32 (fp64
for fp64 images), whatever dtype the images have.
"""

from typing import cast

import torch
from torch import Tensor

BLOCK = 2**20
"""Values in one block of the CPU's moments: it stays in the cache between its two passes, and the kernel for channels
last adds up one fp32 sum over all rows, whose error grows with their number (2e-5 of the variance at 100,000)."""


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of each channel of images [n, channels, height, width]."""
    if x.is_cuda:
        return torch.batch_norm_update_stats(x, None, None, 0.0)
    scratch = torch.zeros(2, x.shape[1], dtype=statistics_dtype(x))  # its dtype is what the kernel answers in
    blocks = x.split(max(1, BLOCK // max(1, x[0].numel())))
    found = [torch.stack(torch.batch_norm_update_stats(block, scratch[0], scratch[1], 0.1)) for block in blocks]
    if len(found) == 1:
        return found[0][0], found[0][1]
    counts = torch.tensor([len(block) / len(x) for block in blocks], dtype=torch.float64)
    mean, var = torch.stack(found).double().unbind(1)
    together = counts @ mean
    var = counts @ (var + (mean - together).square_())
    return together.to(scratch.dtype), var.to(scratch.dtype)


def normalise(x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """(x - mean) * invstd * weight + bias."""
    if x.is_cuda:
        return torch.batch_norm_elemt(x, weight, bias, mean, invstd, 0.0)
    return _affine(x, mean, weight * invstd, bias)


def gradient_sums(dy: Tensor, x: Tensor, mean: Tensor, invstd: Tensor) -> tuple[Tensor, Tensor]:
    """sum(dy) and sum(dy * (x - mean)) of each channel."""
    if x.is_cuda:
        sum_dy, sum_dy_xmu, _, _ = torch.batch_norm_backward_reduce(dy, x, mean, invstd, invstd, True, False, False)
        return sum_dy, sum_dy_xmu
    one = torch.ones_like(mean)
    _, sum_dy_xmu, sum_dy = torch.ops.aten.native_batch_norm_backward(
        dy, x, one, mean, one, None, None, False, 0.0, [False, True, True]
    )
    return cast(Tensor, sum_dy), cast(Tensor, sum_dy_xmu)


def input_gradient(
    dy: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor, sums: Tensor, count: Tensor
) -> Tensor:
    """weight * invstd * (dy - sums[0] / count - (x - mean) * invstd^2 * sums[1] / count), in the dtype of x."""
    if x.is_cuda:
        return torch.batch_norm_backward_elemt(dy, x, mean, invstd, weight, sums[0], sums[1], count.to(torch.int32))
    scale = weight * invstd
    shares = sums / count.to(sums.dtype)
    of_x = _affine(x.to(scale.dtype), mean, -scale * invstd * invstd * shares[1], -scale * shares[0])
    return of_x.addcmul_(dy.to(scale.dtype), scale.view(1, -1, 1, 1)).to(x.dtype)


def statistics_dtype(x: Tensor) -> torch.dtype:
    """fp32, but for images that are more exact than that."""
    return torch.promote_types(x.dtype, torch.float32)


def memory_order(x: Tensor) -> torch.memory_format:
    """Channels last where `x` is, else the order of its dimensions."""
    last = x.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last else torch.contiguous_format


def _affine(x: Tensor, mean: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """(x - mean) * scale + shift in one pass, on a CPU."""
    return torch.native_batch_norm(x, scale, shift, mean, torch.ones_like(mean), False, 0.0, 0.0)[0]
