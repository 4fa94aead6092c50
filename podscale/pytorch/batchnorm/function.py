"""Batch norm over the batches of a group of ranks, forward and backward, with one message each way.

With sums over the whole group (Ioffe 2015, section 3) and xmu = x - mean:
dx = weight * invstd * (dy - sum(dy) / count - xmu * invstd^2 * sum(dy * xmu) / count).
The gradients of weight and bias stay local: averaging gradients over the ranks, which follows anyway, completes them.

Under torch.compile the same function is traced: plain operations instead of kernels, functional collectives instead
of c10d's, no break of the graph.
"""

from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import _functional_collectives as functional

from podscale.distributed.waits import BATCH_NORM, waiting_for
from podscale.pytorch.batchnorm import native, traced
from podscale.pytorch.batchnorm.native import memory_order
from podscale.pytorch.batchnorm.statistics import combine_moments


def sync_batch_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """Images [n, channels, h, w] normalised over all ranks of `group`; mean and unbiased variance, without gradient.

    Every rank of the group must call this in the same order; the batches may differ in size, but none is empty.
    """
    y, mean, var = _SyncBatchNorm.apply(x, weight, bias, eps, group)
    return y, mean, var


class _SyncBatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, group: dist.ProcessGroup) -> Any:
        kernels = traced if torch.compiler.is_compiling() else native
        x = x.contiguous(memory_format=memory_order(x))
        mean, var = kernels.moments(x)
        exact = native.statistics_dtype(x)
        found = combine_moments(
            mean, var, x.numel() // x.shape[1], lambda message: _all_reduce_sum(message, group), exact
        )
        invstd = torch.rsqrt(found.var + eps)
        y = kernels.normalise(x, found.mean, invstd, weight.to(exact), bias.to(exact))
        ctx.save_for_backward(x, weight, found.mean, invstd, found.count)
        ctx.group = group
        ctx.mark_non_differentiable(found.mean, found.unbiased)
        return y, found.mean, found.unbiased

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        kernels = traced if torch.compiler.is_compiling() else native
        x, weight, mean, invstd, count = ctx.saved_tensors
        dy = gradients[0].contiguous(memory_format=memory_order(x))
        sum_dy, sum_dy_xmu = kernels.gradient_sums(dy, x, mean, invstd)
        sums = _all_reduce_sum(torch.stack([sum_dy, sum_dy_xmu]), ctx.group)
        dx = kernels.input_gradient(dy, x, mean, invstd, weight.to(mean.dtype), sums, count)
        return dx, (sum_dy_xmu * invstd).to(weight.dtype), sum_dy.to(weight.dtype), None, None


def _all_reduce_sum(message: Tensor, group: dist.ProcessGroup) -> Tensor:
    if torch.compiler.is_compiling():
        message = functional.all_reduce(message, "sum", group)
        return functional.wait_tensor(message)  # type: ignore[no-any-return]
    with waiting_for(BATCH_NORM):
        dist.all_reduce(message, group=group)
    return message
