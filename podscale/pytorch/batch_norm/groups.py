"""Batch norm whose statistics span a group of ranks, or a part of a rank's batch.

Group of ranks: one message in forward and one in backward. Each rank computes its mean and variance (two passes or
Welford, never a difference of large sums) and sends count, count * mean and count * (var + mean^2) in fp64 in one
all-reduce. With fp32 sums, a mean of 1000 would erase a variance below 0.06. Eight bytes a value are 425 KB a step in
the 53 messages of ResNet-50, which are bound by latency, not bandwidth. The weighted sum handles uneven batches.

With sums over the whole group (Ioffe 2015, section 3) and xmu = x - mean, the gradient is
dx = weight * invstd * (dy - sum(dy) / count - xmu * invstd^2 * sum(dy * xmu) / count).
The gradients of weight and bias stay local: the gradient average over the ranks completes them. Under torch.compile
the same function is traced with plain operations and functional collectives, without a graph break.

Parts of a batch (ghost batch norm) need no message: each is normalised by torch's local batch norm, as on many small
cores.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import _functional_collectives as functional

from podscale.distributed.waits import BATCH_NORM, waiting_for
from podscale.pytorch.batch_norm import operations
from podscale.pytorch.batch_norm.operations import memory_order, statistics_dtype

SumFunction = Callable[[Tensor], Tensor]
"""Sums a tensor over the ranks of a group, possibly in place."""


@dataclass(frozen=True)
class ChannelMoments:
    """Mean, biased and unbiased variance [channels]; `count` is the number of values of a channel, fp64 [1]."""

    mean: Tensor
    var: Tensor
    unbiased: Tensor
    count: Tensor


def combine_moments(
    mean: Tensor, var: Tensor, count: int, sum_over_group: SumFunction, dtype: torch.dtype
) -> ChannelMoments:
    """Return the moments over all ranks, in `dtype`.

    Args:
        mean: mean of this rank's values, [channels].
        var: biased variance of this rank's values, [channels].
        count: values of a channel on this rank.
    """
    channels = len(mean)
    message = torch.cat([mean, var, mean.new_ones(1)]).double()
    local_mean, local_square = message[:channels], message[channels:-1]
    local_square.addcmul_(local_mean, local_mean)
    message = sum_over_group(message.mul_(count))
    total = message[-1:]
    exact_mean, exact_square = message[:-1].div(total).view(2, channels)
    exact_var = torch.addcmul(exact_square, exact_mean, exact_mean, value=-1).clamp_(min=0.0)
    unbiased = exact_var * (total / (total - 1).clamp(min=1.0))
    rounded = torch.stack([exact_mean, exact_var, unbiased]).to(dtype)
    return ChannelMoments(rounded[0], rounded[1], rounded[2], total)


def sync_batch_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise images `x` [n, channels, height, width] over `group`, by `weight` and `bias` [channels].

    Every rank of the group must call this in the same order. The batches may differ in size, but must not be empty.
    Returns output, mean and unbiased variance, the last two without gradient.
    """
    y, mean, var = _SyncBatchNorm.apply(x, weight, bias, eps, group)
    return y, mean, var


class _SyncBatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, group: dist.ProcessGroup) -> Any:
        x = x.contiguous(memory_format=memory_order(x))
        mean, var = operations.moments(x)
        exact = statistics_dtype(x)
        count = x.numel() // x.shape[1]
        moments = combine_moments(mean, var, count, lambda message: all_reduce_sum(message, group), exact)
        invstd = torch.rsqrt(moments.var + eps)
        y = operations.normalise(x, moments.mean, invstd, weight.to(exact), bias.to(exact))
        ctx.save_for_backward(x, weight, moments.mean, invstd, moments.count)
        ctx.group = group
        ctx.mark_non_differentiable(moments.mean, moments.unbiased)
        return y, moments.mean, moments.unbiased

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, invstd, count = ctx.saved_tensors
        dy = gradients[0].contiguous(memory_format=memory_order(x))
        sum_dy, sum_dy_xmu = operations.gradient_sums(dy, x, mean, invstd)
        sums = all_reduce_sum(torch.stack([sum_dy, sum_dy_xmu]), ctx.group)
        dx = operations.input_gradient(dy, x, mean, invstd, weight.to(mean.dtype), sums, count)
        return dx, (sum_dy_xmu * invstd).to(weight.dtype), sum_dy.to(weight.dtype), None, None


def all_reduce_sum(message: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return `message` summed over the ranks of `group`, in place unless traced by the compiler."""
    if torch.compiler.is_compiling():
        message = functional.all_reduce(message, "sum", group)
        return functional.wait_tensor(message)  # type: ignore[no-any-return]
    with waiting_for(BATCH_NORM):
        dist.all_reduce(message, group=group)
    return message


Running = tuple[Tensor, Tensor]
"""Running mean and variance of each channel, fp32 [channels]."""


def ghost_batch_norm(
    x: Tensor, weight: Tensor, bias: Tensor, running: Running, part_size: int, momentum: float, eps: float
) -> Tensor:
    """Normalise each part of `part_size` images by its own statistics. A remainder joins the last part.

    The running statistics move once, towards the mean of the parts' means and of their unbiased variances: as if each
    part were a rank, and the ranks' running statistics were averaged.

    Args:
        x: images [n, channels, height, width].
        weight: scale, fp32 [channels].
        bias: shift, fp32 [channels].
        running: updated in place.
    """
    parts = len(x) // part_size
    sizes = [part_size] * (parts - 1) + [len(x) - (parts - 1) * part_size]
    if torch.compiler.is_compiling():
        y, *statistics = _traced_ghost_batch_norm(x, weight, bias, sizes, eps)
        for average, new in zip(running, statistics, strict=True):
            average.lerp_(new, momentum)
        return y
    return _GhostBatchNorm.apply(x, weight, bias, running, sizes, momentum, eps)  # type: ignore[no-any-return]


class _GhostBatchNorm(torch.autograd.Function):
    """torch's local batch norm of each part, written into one output."""

    @staticmethod
    def forward(  # noqa: PLR0913 (autograd takes each tensor as a parameter)
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        running: Running,
        sizes: list[int],
        momentum: float,
        eps: float,
    ) -> Tensor:
        x = x.contiguous(memory_format=memory_order(x))
        y = torch.empty_like(x)
        saved = x.new_empty((2, len(sizes), x.shape[1]), dtype=weight.dtype)
        for i, (part, out) in enumerate(zip(x.split(sizes), y.split(sizes), strict=True)):
            outputs = (out, saved[0, i], saved[1, i])
            m = part_momentum(momentum, i, len(sizes))
            torch.native_batch_norm(part, weight, bias, *running, True, m, eps, out=outputs)
        ctx.save_for_backward(x, weight, saved)
        ctx.sizes, ctx.eps = sizes, eps
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, (means, invstds) = ctx.saved_tensors
        dy = gradients[0].contiguous(memory_format=memory_order(x))
        gradients_of_parts = [
            torch.ops.aten.native_batch_norm_backward(
                part_dy, part, weight, None, None, mean, invstd, True, ctx.eps, [True, True, True]
            )
            for part_dy, part, mean, invstd in zip(dy.split(ctx.sizes), x.split(ctx.sizes), means, invstds, strict=True)
        ]
        dx, dw, db = zip(*gradients_of_parts, strict=True)
        return torch.cat(dx), torch.stack(dw).sum(0), torch.stack(db).sum(0), None, None, None, None


def part_momentum(momentum: float, index: int, parts: int) -> float:
    """Return the momentum of part `index` with which each part has weight momentum / parts after the last one."""
    return momentum / (parts - (parts - 1 - index) * momentum)


def _traced_ghost_batch_norm(
    x: Tensor, weight: Tensor, bias: Tensor, sizes: list[int], eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return output, mean of means and mean of unbiased variances, by plain operations for the compiler."""
    ys, means, variances = [], [], []
    equal_parts = len(sizes) if sizes[-1] == sizes[0] else len(sizes) - 1
    cut = equal_parts * sizes[0]
    for images, parts in ((x[:cut], equal_parts), (x[cut:], 1)):
        if len(images):
            values = images.unflatten(0, (parts, -1)).to(statistics_dtype(x))
            var, mean = torch.var_mean(values, dim=(1, 3, 4), correction=0, keepdim=True)
            y = (values - mean) * torch.rsqrt(var + eps) * weight.view(-1, 1, 1) + bias.view(-1, 1, 1)
            ys.append(y.flatten(0, 1).to(x.dtype))
            count = values[0].numel() // x.shape[1]
            means.append(mean.detach().flatten(1))
            variances.append(var.detach().flatten(1) * (count / max(count - 1, 1)))
    return torch.cat(ys), torch.cat(means).mean(0), torch.cat(variances).mean(0)
