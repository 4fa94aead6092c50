"""The four passes of batch norm as plain operations, from which a compiler makes kernels and fuses what stands around.

Same meaning as `native`, where the texts are.
"""

import torch
from torch import Tensor

from podscale.pytorch.batchnorm.native import statistics_dtype

OVER = (0, 2, 3)


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    var, mean = torch.var_mean(x.to(statistics_dtype(x)), dim=OVER, correction=0)
    return mean, var


def normalise(x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    y = (x.to(mean.dtype) - _spread(mean)) * _spread(invstd * weight) + _spread(bias)
    return y.to(x.dtype)


def gradient_sums(dy: Tensor, x: Tensor, mean: Tensor, invstd: Tensor) -> tuple[Tensor, Tensor]:
    exact = dy.to(mean.dtype)
    return exact.sum(OVER), (exact * (x.to(mean.dtype) - _spread(mean))).sum(OVER)


def input_gradient(
    dy: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor, sums: Tensor, count: Tensor
) -> Tensor:
    of_dy, of_xmu = sums / count.to(sums.dtype)
    centred = x.to(mean.dtype) - _spread(mean)
    dx = (dy.to(mean.dtype) - _spread(of_dy) - centred * _spread(invstd * invstd * of_xmu)) * _spread(weight * invstd)
    return dx.to(x.dtype)


def _spread(values: Tensor) -> Tensor:
    return values.view(1, -1, 1, 1)
