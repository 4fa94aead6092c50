"""The message in which the ranks of a group put their moments together: one all-reduce, whatever the group's size.

Each rank finds its own mean and variance (two passes or Welford, never a difference of large sums). What travels is
count, count * mean and count * (var + mean^2), in fp64, where that difference costs nothing: with fp32 sums a mean of
1000 leaves nothing of a variance below 0.06. Eight bytes a value are 425 KB a step in the 53 messages of ResNet-50,
which latency rules, not bandwidth. A weighted sum makes uneven batches right by itself.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

SumFunction = Callable[[Tensor], Tensor]
"""Adds a tensor up over the ranks of a group; may do it in place."""


@dataclass(frozen=True)
class ChannelMoments:
    """Mean, biased and unbiased variance of each channel; count: values behind each, fp64 [1] on the device."""

    mean: Tensor
    var: Tensor
    unbiased: Tensor
    count: Tensor


def combine_moments(
    mean: Tensor, var: Tensor, count: int, sum_over_group: SumFunction, dtype: torch.dtype
) -> ChannelMoments:
    """The moments of all ranks' values, in `dtype`, from each rank's own (its biased variance)."""
    channels = len(mean)
    message = torch.cat([mean, var, mean.new_ones(1)]).double()
    own_mean, own_square = message[:channels], message[channels:-1]
    own_square.addcmul_(own_mean, own_mean)
    message = sum_over_group(message.mul_(count))
    total = message[-1:]
    exact_mean, exact_square = message[:-1].div(total).view(2, channels)
    exact_var = torch.addcmul(exact_square, exact_mean, exact_mean, value=-1).clamp_(min=0.0)
    unbiased = exact_var * (total / (total - 1).clamp(min=1.0))
    rounded = torch.stack([exact_mean, exact_var, unbiased]).to(dtype)
    return ChannelMoments(rounded[0], rounded[1], rounded[2], total)
