"""Batch norm together with what is beside it in a ResNet: ReLU, a block's sum, the stem's pooling, 1x1 convolutions.

A layer with fused kernels does all of it in one pass (see `fused` and `gemm`); any other module runs as separate
operations.

A block's output has two consumers, the next block's first convolution and its shortcut. Autograd would add their
gradients in a pass of its own over the largest tensors of the network. Fused kernels give the output out twice, as a
`Fork`, take both gradients and add them on the way. If the next convolution is fused too, the block leaves its sum to
it, as a `PendingSum`.
"""

from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor, nn
from torch.nn import functional as F

from podscale.pytorch.batch_norm.layer import BatchNorm

if TYPE_CHECKING:
    from podscale.pytorch.batch_norm.fused import ChunkMoments  # needs Triton


class Fork(NamedTuple):
    """The same values for a block's first convolution and for its shortcut, with separate gradients."""

    branch: Tensor
    shortcut: Tensor


class Convolved(NamedTuple):
    """Images that a convolution wrote, [n, channels, height, width], with their moments if it computed them."""

    images: Tensor
    moments: "ChunkMoments | None" = None


class PendingSum(NamedTuple):
    """Output of a block before the sum: what its last batch norm normalises, and its shortcut."""

    norm: BatchNorm
    x: Convolved
    shortcut: Tensor


class Projection(nn.Sequential):
    """Shortcut of a convolution and its batch norm."""

    def forward(self, x: Tensor) -> Tensor:
        conv, norm = self
        if not isinstance(norm, BatchNorm):
            return norm(conv(x))  # type: ignore[no-any-return]
        return normalise(norm, convolve(conv, norm, x))


def split_fork(x: Tensor | Fork | PendingSum) -> Fork:
    """Return `x`, images [n, channels, height, width], for both consumers."""
    if isinstance(x, PendingSum):
        return _add(x)
    return x if isinstance(x, Fork) else Fork(x, x)


def begin_block(
    conv: nn.Module, norm: nn.Module, downsample: nn.Module, x: Tensor | Fork | PendingSum
) -> tuple[Convolved, Tensor]:
    """Return the first convolution of a block's input and its shortcut.

    Args:
        norm: batch norm that follows the convolution.
        x: the block's input, images [n, channels, height, width].
    """
    if isinstance(x, PendingSum) and isinstance(norm, BatchNorm):
        begun = _begin_with_sum(conv, norm, downsample, x)
        if begun is not None:
            return begun
    fork = split_fork(x)
    return convolve(conv, norm, fork.branch), downsample(fork.shortcut)


def _begin_with_sum(
    conv: nn.Module, norm: BatchNorm, downsample: nn.Module, pending: PendingSum
) -> tuple[Convolved, Tensor] | None:
    """Return the result of `begin_block` by the GEMM kernels; None if they do not apply."""
    last_norm, (images, moments), shortcut = pending
    if not norm.folds(conv, images) or conv.stride != (1, 1):
        return None
    from podscale.pytorch.batch_norm import gemm

    if isinstance(downsample, nn.Identity):
        y, activated = gemm.sum_convolve(last_norm, images, shortcut, conv, moments)
        return Convolved(*y), activated
    if not isinstance(downsample, Projection):
        return None
    projection, projected_norm = downsample
    if not isinstance(projected_norm, BatchNorm) or not projected_norm.folds(projection, images):
        return None
    y, projected = gemm.sum_convolve_twice(last_norm, images, shortcut, conv, projection, moments)
    return Convolved(*y), normalise(projected_norm, Convolved(*projected))


def convolve(conv: nn.Module, norm: nn.Module, x: Tensor) -> Convolved:
    """Return the convolution of `x` [n, channels, height, width], with the moments for `norm`, which follows it."""
    if isinstance(norm, BatchNorm) and norm.folds(conv, x):
        from podscale.pytorch.batch_norm import gemm

        return Convolved(*gemm.convolve(conv, x))
    return Convolved(conv(x))


def norm_relu_convolve(norm: nn.Module, conv: nn.Module, x: Tensor) -> Convolved:
    """Return the convolution of the ReLU of the normalised images `x` [n, channels, height, width]."""
    if isinstance(norm, BatchNorm) and norm.folds(conv, x) and conv.stride == (1, 1):
        from podscale.pytorch.batch_norm import gemm

        return Convolved(*gemm.norm_relu_convolve(norm, conv, x))
    return Convolved(conv(norm_relu(norm, x)))


def normalise(norm: BatchNorm, x: Convolved) -> Tensor:
    """Return the normalised images."""
    if x.moments is not None:
        from podscale.pytorch.batch_norm import fused

        return fused.norm(norm, *x)
    return norm(x.images)  # type: ignore[no-any-return]


def norm_relu(norm: nn.Module, x: Tensor | Convolved) -> Tensor:
    """Return the ReLU of the normalised images `x` [n, channels, height, width]."""
    images, moments = x if isinstance(x, Convolved) else Convolved(x)
    if isinstance(norm, BatchNorm) and norm.runs_fused(images):
        from podscale.pytorch.batch_norm import fused

        return fused.norm_relu(norm, images, moments)
    return F.relu(norm(images), inplace=True)


def norm_add_relu(
    norm: nn.Module, drop_path: nn.Module, x: Tensor | Convolved, shortcut: Tensor
) -> Tensor | Fork | PendingSum:
    """Return the ReLU of the sum of the normalised `x`, after `drop_path`, and `shortcut` [n, channels, ...]."""
    x = x if isinstance(x, Convolved) else Convolved(x)
    images = x.images
    is_plain_sum = isinstance(drop_path, nn.Identity) and shortcut.dtype == images.dtype
    if is_plain_sum and isinstance(norm, BatchNorm) and norm.runs_fused(images):
        pending = PendingSum(norm, x, shortcut)
        return pending if norm.folds_convolutions else _add(pending)
    return F.relu(drop_path(norm(images)) + shortcut, inplace=True)


def _add(pending: PendingSum) -> Fork:
    from podscale.pytorch.batch_norm import fused

    norm, (images, moments), shortcut = pending
    return Fork(*fused.norm_add_relu(norm, images, shortcut, moments))


def norm_relu_pool(norm: nn.Module, pool: nn.Module, x: Tensor) -> Tensor | Fork:
    """Return the pooled ReLU of the normalised images `x` [n, channels, height, width]."""
    has_even_sides = x.shape[2] % 2 == 0 and x.shape[3] % 2 == 0
    if isinstance(pool, nn.MaxPool2d) and has_even_sides and isinstance(norm, BatchNorm) and norm.runs_fused(x):
        from podscale.pytorch.batch_norm import fused

        return Fork(*fused.norm_relu_pool(norm, x))
    return pool(norm_relu(norm, x))  # type: ignore[no-any-return]
