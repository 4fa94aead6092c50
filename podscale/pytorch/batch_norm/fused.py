"""Autograd functions of the fused kernels: batch norm with ReLU, with a block's sum, and with the stem's pooling.

Results are fp32 until they are rounded once, after the ReLU; separate operations round after each of them. With a group
of ranks, moments and gradient sums are added up over it as in `groups`.
"""

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch import distributed as dist

from podscale.pytorch.batch_norm import fused_calls as calls
from podscale.pytorch.batch_norm import fused_pool_kernels as pool_kernels
from podscale.pytorch.batch_norm.fused_calls import (
    MASK_OF_BITS,
    MASK_OF_X,
    NO_MASK,
    Affine,
    ImageRows,
    InputGradientTerms,
)
from podscale.pytorch.batch_norm.groups import all_reduce_sum, combine_moments


class NormLayer(Protocol):
    """Attributes of `layer.BatchNorm`, which calls these functions."""

    weight: torch.nn.Parameter
    bias: torch.nn.Parameter
    running_mean: Tensor
    running_var: Tensor
    momentum: float
    eps: float
    group: dist.ProcessGroup | None


Gradients = tuple[Tensor, Tensor | None]
"""Gradients of an output by its consumers; their sum counts."""


class ChunkMoments(NamedTuple):
    """Moments of images that the kernel which wrote them has computed (see `calls.chunk_moments`)."""

    partial: Tensor
    shape: ImageRows


def norm(layer: NormLayer, x: Tensor, moments: ChunkMoments | None = None) -> Tensor:
    """Return the normalised images `x` [n, channels, height, width], by `moments` if they are known."""
    return _Norm.apply(x, layer.weight, layer.bias, None, layer, NO_MASK, moments)  # type: ignore[no-any-return]


def norm_relu(layer: NormLayer, x: Tensor, moments: ChunkMoments | None = None) -> Tensor:
    """Return the ReLU of the normalised images `x` [n, channels, height, width]."""
    return _Norm.apply(x, layer.weight, layer.bias, None, layer, MASK_OF_X, moments)  # type: ignore[no-any-return]


def norm_add_relu(
    layer: NormLayer, x: Tensor, shortcut: Tensor, moments: ChunkMoments | None = None
) -> tuple[Tensor, Tensor]:
    """Return the ReLU of the normalised `x` plus `shortcut` [n, channels, ...], twice, for its two consumers."""
    shortcut = shortcut.contiguous(memory_format=torch.channels_last)
    parameters = (layer.weight, layer.bias)
    return _Norm.apply(x, *parameters, shortcut, layer, MASK_OF_BITS, moments)  # type: ignore[no-any-return]


def norm_relu_pool(layer: NormLayer, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the pooled ReLU of the normalised `x` [n, channels, height, width], twice, for its two consumers."""
    return _NormPool.apply(x, layer.weight, layer.bias, layer)  # type: ignore[no-any-return]


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0913 (autograd takes each tensor as a parameter)
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        shortcut: Tensor | None,
        layer: NormLayer,
        relu: int,
        moments: ChunkMoments | None,
    ) -> Any:
        shape = ImageRows.of(x)
        affine, count = batch_affine(layer, x, moments)
        y, bits = calls.normalise(x, shape, affine, relu, shortcut)
        ctx.save_for_backward(x, *affine, count, bits)
        ctx.group, ctx.relu = layer.group, relu
        ctx.set_materialize_grads(False)
        return (y, y.view_as(y)) if relu == MASK_OF_BITS else y

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *affine_values, count, bits = ctx.saved_tensors
        affine, shape, relu = Affine(*affine_values), ImageRows.of(x), ctx.relu
        if (gradients := _nhwc_gradients(outputs, x.dtype)) is None:
            return (None,) * 7
        partial, gradient = calls.chunk_gradient_sums(gradients, x, shape, affine, relu, bits)
        terms = gradient_terms(ctx.group, partial, shape, affine, count)
        dx = calls.input_gradient(gradient, x, shape, affine, terms.slope, terms.constant, relu)
        return dx, terms.weight, terms.bias, gradient if relu == MASK_OF_BITS else None, None, None, None


class _NormPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, layer: NormLayer) -> Any:
        affine, count = batch_affine(layer, x)
        pooled, indices = pool_kernels.pool(x, affine)
        ctx.save_for_backward(x, *affine, count, indices)
        ctx.group = layer.group
        ctx.set_materialize_grads(False)
        return pooled, pooled.view_as(pooled)

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *affine_values, count, indices = ctx.saved_tensors
        affine, shape = Affine(*affine_values), ImageRows.of(x)
        if (gradients := _nhwc_gradients(outputs, x.dtype)) is None:
            return (None,) * 4
        partial = pool_kernels.pool_chunk_gradient_sums(gradients, indices, x, affine)
        terms = gradient_terms(ctx.group, partial, shape, affine, count)
        dx = pool_kernels.pool_input_gradient(gradients, indices, x, affine, terms.slope, terms.constant)
        return dx, terms.weight, terms.bias, None


def batch_affine(layer: NormLayer, x: Tensor, moments: ChunkMoments | None = None) -> tuple[Affine, Tensor | None]:
    """Return the map of a batch and, with a group, its number of values of a channel, fp64 [1]; move the averages.

    Args:
        x: images [n, channels, height, width] in NHWC order; read only if `moments` is None.
    """
    if moments is None:
        shape = ImageRows.of(x)
        moments = ChunkMoments(calls.chunk_moments(x, shape), shape)
    partial, shape = moments
    running = (layer.running_mean, layer.running_var)
    if layer.group is None:
        return calls.local_affine(partial, shape, layer.weight, layer.bias, running, layer.momentum, layer.eps), None
    group = layer.group
    mean, var = calls.local_moments(partial, shape)
    total = combine_moments(mean, var, shape.rows, lambda message: all_reduce_sum(message, group), torch.float32)
    invstd = torch.rsqrt(total.var + layer.eps)
    scale = layer.weight.detach() * invstd
    for average, new in zip(running, (total.mean, total.unbiased), strict=True):
        average.lerp_(new, layer.momentum)
    shift = layer.bias.detach() - total.mean * scale
    return Affine(total.mean, total.var, invstd, scale, shift), total.count


def gradient_terms(
    group: Any, partial: Tensor, shape: ImageRows, affine: Affine, count: Tensor | None
) -> InputGradientTerms:
    """Return the terms of the input gradient. The gradients of weight and bias are this rank's (see `groups`).

    Args:
        partial: sums of chunks by `calls.chunk_gradient_sums`, fp32 [2, parts, channels].
        count: values of a channel over the group, fp64 [1]; None without a group.
    """
    if count is None:
        return calls.local_gradient_terms(partial, shape, affine)
    own = calls.local_gradient_sums(partial, shape, affine)
    total = all_reduce_sum(own.clone(), group)
    mean_g, mean_product = (total / count.to(total.dtype)).unbind()
    factor = -affine.scale
    return InputGradientTerms(
        own[0], own[1] * affine.invstd, factor * affine.invstd * affine.invstd * mean_product, factor * mean_g
    )


def nhwc_gradient(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the gradient of an output, [n, channels, height, width], in NHWC order and the dtype of the images."""
    return gradient.to(dtype).contiguous(memory_format=torch.channels_last)


def _nhwc_gradients(outputs: tuple[Tensor | None, ...], dtype: torch.dtype) -> Gradients | None:
    """Return the gradients that arrived, each by `nhwc_gradient`; None if there are none."""
    given = [nhwc_gradient(output, dtype) for output in outputs if output is not None]
    if not given:
        return None
    return given[0], given[1] if len(given) > 1 else None
