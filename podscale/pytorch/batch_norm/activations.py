"""Batch norm together with what follows it in a ResNet: ReLU, a block's sum, the stem's pooling.

A layer with fused kernels does all of it in one pass (see `fused`); any other module runs as separate operations.

A block's output has two consumers, the next block's first convolution and its shortcut. Autograd would add their
gradients in a pass of its own over the largest tensors of the network. Fused kernels give the output out twice, as a
`Fork`, take both gradients and add them on the way.
"""

from typing import NamedTuple

from torch import Tensor, nn
from torch.nn import functional as F

from podscale.pytorch.batch_norm.layer import BatchNorm


class Fork(NamedTuple):
    """The same values for a block's first convolution and for its shortcut, with separate gradients."""

    branch: Tensor
    shortcut: Tensor


def split_fork(x: Tensor | Fork) -> Fork:
    """Return `x`, images [n, channels, height, width], for both consumers."""
    return x if isinstance(x, Fork) else Fork(x, x)


def norm_relu(norm: nn.Module, x: Tensor) -> Tensor:
    """Return the ReLU of the normalised images `x` [n, channels, height, width]."""
    if isinstance(norm, BatchNorm) and norm.runs_fused(x):
        from podscale.pytorch.batch_norm import fused

        return fused.norm_relu(norm, x)
    return F.relu(norm(x), inplace=True)


def norm_add_relu(norm: nn.Module, drop_path: nn.Module, x: Tensor, shortcut: Tensor) -> Tensor | Fork:
    """Return the ReLU of the sum of the normalised `x`, after `drop_path`, and `shortcut` [n, channels, ...]."""
    is_plain_sum = isinstance(drop_path, nn.Identity) and shortcut.dtype == x.dtype
    if is_plain_sum and isinstance(norm, BatchNorm) and norm.runs_fused(x):
        from podscale.pytorch.batch_norm import fused

        return Fork(*fused.norm_add_relu(norm, x, shortcut))
    return F.relu(drop_path(norm(x)) + shortcut, inplace=True)


def norm_relu_pool(norm: nn.Module, pool: nn.Module, x: Tensor) -> Tensor | Fork:
    """Return the pooled ReLU of the normalised images `x` [n, channels, height, width]."""
    has_even_sides = x.shape[2] % 2 == 0 and x.shape[3] % 2 == 0
    if isinstance(pool, nn.MaxPool2d) and has_even_sides and isinstance(norm, BatchNorm) and norm.runs_fused(x):
        from podscale.pytorch.batch_norm import fused

        return Fork(*fused.norm_relu_pool(norm, x))
    return pool(norm_relu(norm, x))  # type: ignore[no-any-return]
