"""Batch norm whose statistics may span a group of ranks (Ying 2018, section 3.4).

Groups are fixed runs of consecutive ranks, so that with groups inside a node the many small all-reduces stay there.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F

from podscale.pytorch.world import World


class BatchNorm(nn.Module):
    """Normalises images [n, channels, height, width] per channel, over the batch or over the batches of `group`.

    Running statistics are fp32; the running variance is the unbiased one, as in torch. There is no
    `num_batches_tracked`: the momentum is constant, and one counter kernel per layer and step would buy nothing.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int, *, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__()
        self.eps, self.momentum = eps, momentum
        self.group: dist.ProcessGroup | None = None
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.group is None:
            return F.batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias, self.training, self.momentum, self.eps
            )
        y, mean, var, count = _GroupNorm.apply(x, self.weight, self.bias, self.eps, self.group)
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var * (count / (count - 1)), self.momentum)
        return y  # type: ignore[no-any-return]


class _GroupNorm(torch.autograd.Function):
    """Forward: sums, sums of squares and the count in one fp32 all-reduce. Backward: the two sums of its gradient.

    With xhat = (x - mean) * rstd and sums over the whole group (Ioffe 2015, section 3):
    dx = weight * rstd * (dy - sum(dy)/count - xhat * sum(dy * xhat)/count). The gradients of weight and bias stay
    local: averaging gradients over ranks, which follows anyway, is what completes them.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, group: dist.ProcessGroup
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        values = x.float()
        count = values.new_full((1,), x.numel() / x.shape[1])
        sums = torch.cat([_channel_sum(values), _channel_sum(values * values), count])
        dist.all_reduce(sums, group=group)
        channels = x.shape[1]
        count = sums[-1]
        mean = sums[:channels] / count
        var = (sums[channels:-1] / count - mean * mean).clamp_(min=0.0)
        rstd = torch.rsqrt(var + eps)
        scale = weight * rstd
        y = values * _per_channel(scale) + _per_channel(bias - mean * scale)
        ctx.save_for_backward(x, weight, mean, rstd, count)
        ctx.group = group
        ctx.mark_non_differentiable(mean, var, count)
        return y.to(x.dtype), mean, var, count

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        x, weight, mean, rstd, count = ctx.saved_tensors
        dy = gradients[0].float()
        xhat = (x.float() - _per_channel(mean)) * _per_channel(rstd)
        bias_gradient, weight_gradient = _channel_sum(dy), _channel_sum(dy * xhat)
        sums = torch.cat([bias_gradient, weight_gradient])
        dist.all_reduce(sums, group=ctx.group)
        over_group, against_xhat = (sums / count).chunk(2)
        dx = (dy - _per_channel(over_group) - xhat * _per_channel(against_xhat)) * _per_channel(weight * rstd)
        return dx.to(x.dtype), weight_gradient, bias_gradient, None, None


def _channel_sum(x: Tensor) -> Tensor:
    return x.sum(dim=(0, 2, 3))


def _per_channel(values: Tensor) -> Tensor:
    return values.view(1, -1, 1, 1)


def span_groups(model: nn.Module, world: World, ranks: int) -> None:
    """Lets every batch norm of `model` share statistics among `ranks` consecutive ranks; 1 leaves each to itself."""
    if ranks == 1:
        return
    group = world.consecutive_group(ranks)
    for module in model.modules():
        if isinstance(module, BatchNorm):
            module.group = group
