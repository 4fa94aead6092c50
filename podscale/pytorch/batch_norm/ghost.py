"""Ghost batch norm: statistics over equal parts of a rank's batch, as on many small cores."""

from typing import Any

import torch
from torch import Tensor

from podscale.pytorch.batch_norm.native_kernels import memory_order, statistics_dtype


def ghost_batch_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    part_size: int,
    momentum: float,
    eps: float,
) -> Tensor:
    """Images [n, channels, h, w] with n >= part, each `part` of them normalised by itself; a rest joins the last part.

    The running statistics move once, towards the mean of the parts' means and of their unbiased variances: as if each
    part were a rank, and the ranks' running statistics were averaged.
    """
    starts = range(0, len(x) - part_size + 1, part_size)
    sizes = [part_size] * (len(starts) - 1) + [len(x) - starts[-1]]
    if torch.compiler.is_compiling():
        y, mean, unbiased = _traced_ghost_batch_norm(x, weight, bias, sizes, eps)
        running_mean.lerp_(mean, momentum)
        running_var.lerp_(unbiased, momentum)
        return y
    return _GhostBatchNorm.apply(x, weight, bias, running_mean, running_var, sizes, momentum, eps)  # type: ignore[no-any-return]


class _GhostBatchNorm(torch.autograd.Function):
    """torch's local batch norm, part by part, straight into one output."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        running_mean: Tensor,
        running_var: Tensor,
        sizes: list[int],
        momentum: float,
        eps: float,
    ) -> Tensor:
        x = x.contiguous(memory_format=memory_order(x))
        y = torch.empty_like(x)
        saved = x.new_empty((2, len(sizes), x.shape[1]), dtype=weight.dtype)
        for i, (given, out) in enumerate(zip(x.split(sizes), y.split(sizes), strict=True)):
            torch.native_batch_norm(
                given,
                weight,
                bias,
                running_mean,
                running_var,
                True,
                part_momentum(momentum, i, len(sizes)),
                eps,
                out=(out, saved[0, i], saved[1, i]),
            )
        ctx.save_for_backward(x, weight, saved)
        ctx.sizes, ctx.eps = sizes, eps
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, (means, invstds) = ctx.saved_tensors
        dy = gradients[0].contiguous(memory_format=memory_order(x))
        parts = [
            torch.ops.aten.native_batch_norm_backward(
                d, given, weight, None, None, mean, invstd, True, ctx.eps, [True, True, True]
            )
            for d, given, mean, invstd in zip(dy.split(ctx.sizes), x.split(ctx.sizes), means, invstds, strict=True)
        ]
        dx, dw, db = zip(*parts, strict=True)
        nothing = (None, None, None, None, None)
        return torch.cat(dx), torch.stack(dw).sum(0), torch.stack(db).sum(0), *nothing


def part_momentum(momentum: float, index: int, parts: int) -> float:
    """The momentum of part `index` with which all parts, one after the other, weigh momentum / parts each."""
    return momentum / (parts - (parts - 1 - index) * momentum)


def _traced_ghost_batch_norm(
    x: Tensor, weight: Tensor, bias: Tensor, sizes: list[int], eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The same as plain operations, for the compiler: output, mean of means, mean of unbiased variances."""
    ys, means, variances = [], [], []
    whole = len(sizes) if sizes[-1] == sizes[0] else len(sizes) - 1
    cut = whole * sizes[0]
    for images, parts in ((x[:cut], whole), (x[cut:], 1)):
        if len(images):
            values = images.unflatten(0, (parts, -1)).to(statistics_dtype(x))
            var, mean = torch.var_mean(values, dim=(1, 3, 4), correction=0, keepdim=True)
            y = (values - mean) * torch.rsqrt(var + eps) * weight.view(-1, 1, 1) + bias.view(-1, 1, 1)
            ys.append(y.flatten(0, 1).to(x.dtype))
            count = values[0].numel() // x.shape[1]
            means.append(mean.detach().flatten(1))
            variances.append(var.detach().flatten(1) * (count / max(count - 1, 1)))
    return torch.cat(ys), torch.cat(means).mean(0), torch.cat(variances).mean(0)
