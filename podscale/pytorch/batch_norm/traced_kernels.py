"""Four passes of batch norm as plain operations, which a compiler fuses with others (see `native_kernels`)."""

import torch
from torch import Tensor

from podscale.pytorch.batch_norm.native_kernels import statistics_dtype

REDUCED_DIMS = (0, 2, 3)


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance [channels] of images `x` [n, channels, height, width], fp32 or fp64."""
    var, mean = torch.var_mean(x.to(statistics_dtype(x)), dim=REDUCED_DIMS, correction=0)
    return mean, var


def normalise(x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return (x - mean) * invstd * weight + bias of images `x`; all others are [channels]."""
    y = (x.to(mean.dtype) - _per_channel(mean)) * _per_channel(invstd * weight) + _per_channel(bias)
    return _cast(y, x.dtype)


def gradient_sums(dy: Tensor, x: Tensor, mean: Tensor, invstd: Tensor) -> tuple[Tensor, Tensor]:
    """Return sum(dy) and sum(dy * (x - mean)) [channels]; `dy` and `x` are images. `invstd` is not used here."""
    exact = dy.to(mean.dtype)
    return exact.sum(REDUCED_DIMS), (exact * (x.to(mean.dtype) - _per_channel(mean))).sum(REDUCED_DIMS)


def input_gradient(
    dy: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor, sums: Tensor, count: Tensor
) -> Tensor:
    """Return weight * invstd * (dy - sums[0] / count - (x - mean) * invstd^2 * sums[1] / count) in the dtype of x."""
    mean_dy, mean_dy_xmu = sums / count.to(sums.dtype)
    xmu = x.to(mean.dtype) - _per_channel(mean)
    dx = dy.to(mean.dtype) - _per_channel(mean_dy) - xmu * _per_channel(invstd * invstd * mean_dy_xmu)
    return _cast(dx * _per_channel(weight * invstd), x.dtype)


def _cast(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `values` in `dtype`, without an operation if they have it.

    In Dynamo of torch 2.11, an output of an autograd function that a cast to its own dtype returns has no gradient: all
    gradients of the function were zero, on a CPU and on an H200.
    """
    return values if values.dtype == dtype else values.to(dtype)


def _per_channel(values: Tensor) -> Tensor:
    return values.view(1, -1, 1, 1)
