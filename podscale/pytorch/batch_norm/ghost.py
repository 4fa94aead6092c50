"""Ghost batch norm: statistics over equal parts of a rank's batch, as on many small cores."""

from typing import Any

import torch
from torch import Tensor

from podscale.pytorch.batch_norm.native_kernels import memory_order, statistics_dtype

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
    def forward(
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
