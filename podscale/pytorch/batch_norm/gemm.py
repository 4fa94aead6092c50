"""Autograd functions of 1x1 convolutions with the batch norms around them (see `gemm_kernels`).

A function's images are those that a convolution writes, before their batch norm, with their moments. The next function
normalises them while it reads them. Normalised images are stored only if a 3x3 convolution or a shortcut reads them.
"""

from typing import Any

import torch
from torch import Tensor, nn

from podscale.pytorch.batch_norm import fused_calls
from podscale.pytorch.batch_norm import gemm_calls as calls
from podscale.pytorch.batch_norm.fused import ChunkMoments, NormLayer, batch_affine, gradient_terms, nhwc_gradient
from podscale.pytorch.batch_norm.fused_calls import NO_MASK, Affine, ImageRows

ConvolvedImages = tuple[Tensor, ChunkMoments]
"""Images that a convolution wrote, [n, outputs, height, width], and their moments."""


def convolve(conv: nn.Conv2d, x: Tensor) -> ConvolvedImages:
    """Return the convolution of images `x` [n, inputs, height, width]."""
    return _with_moments(*_Convolution.apply(x, conv.weight, conv.stride[0]))


def norm_relu_convolve(
    norm: NormLayer, conv: nn.Conv2d, x: Tensor, moments: ChunkMoments | None = None
) -> ConvolvedImages:
    """Return the convolution of the ReLU of the normalised images `x` [n, inputs, height, width]."""
    return _with_moments(*_NormConvolution.apply(x, norm.weight, norm.bias, conv.weight, norm, moments))


def sum_convolve(
    norm: NormLayer, x: Tensor, shortcut: Tensor, conv: nn.Conv2d, moments: ChunkMoments | None = None
) -> tuple[ConvolvedImages, Tensor]:
    """Return the convolution of the ReLU of the normalised `x` plus `shortcut`, and that ReLU for the next shortcut."""
    shortcut = shortcut.contiguous(memory_format=torch.channels_last)
    parameters = (norm.weight, norm.bias)
    y, partial, activated = _SumConvolution.apply(x, *parameters, shortcut, conv.weight, None, 1, norm, moments)
    return _with_moments(y, partial), activated


def sum_convolve_twice(
    norm: NormLayer,
    x: Tensor,
    shortcut: Tensor,
    conv: nn.Conv2d,
    projection: nn.Conv2d,
    moments: ChunkMoments | None = None,
) -> tuple[ConvolvedImages, ConvolvedImages]:
    """Return the convolutions of the ReLU of the normalised `x` plus `shortcut`, by `conv` and by `projection`."""
    shortcut = shortcut.contiguous(memory_format=torch.channels_last)
    weights = (conv.weight, projection.weight, projection.stride[0])
    y, partial, projected, projected_partial = _SumConvolution.apply(
        x, norm.weight, norm.bias, shortcut, *weights, norm, moments
    )
    return _with_moments(y, partial), _with_moments(projected, projected_partial)


def _with_moments(y: Tensor, partial: Tensor) -> ConvolvedImages:
    return y, ChunkMoments(partial, calls.moments_shape(y))


def _round(weight: Tensor, x: Tensor) -> Tensor:
    """Return a weight in the dtype of the images, as autocast does."""
    return weight.detach().to(x.dtype).contiguous()


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: int) -> Any:
        rounded = _round(weight, x)
        y, partial = calls.forward(x, rounded, stride, None)
        ctx.save_for_backward(x, rounded)
        ctx.stride, ctx.dtype = stride, weight.dtype
        ctx.mark_non_differentiable(partial)
        ctx.set_materialize_grads(False)
        return y, partial

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        if dy is None:
            return None, None, None
        dy, stride = nhwc_gradient(dy, x.dtype), ctx.stride
        needs_dx, needs_dw, _ = ctx.needs_input_grad
        dx = calls.data_gradient(dy, weight, x.shape, stride) if needs_dx else None
        dw = calls.weight_gradient(dy, x, ctx.dtype, stride, None) if needs_dw else None
        return dx, dw, None


class _NormConvolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        conv_weight: Tensor,
        layer: NormLayer,
        moments: ChunkMoments | None,
    ) -> Any:
        affine, count = batch_affine(layer, x, moments)
        rounded = _round(conv_weight, x)
        y, partial = calls.forward(x, rounded, 1, affine)
        ctx.save_for_backward(x, rounded, *affine, count)
        ctx.group, ctx.dtype = layer.group, conv_weight.dtype
        ctx.mark_non_differentiable(partial)
        ctx.set_materialize_grads(False)
        return y, partial

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        x, rounded, *affine_values, count = ctx.saved_tensors
        affine, shape = Affine(*affine_values), ImageRows.of(x)
        if dy is None:
            return (None,) * 6
        dy = nhwc_gradient(dy, x.dtype)
        g, sums = calls.masked_data_gradient(dy, rounded, x, affine)
        terms = gradient_terms(ctx.group, sums, shape, affine, count)
        dw = calls.weight_gradient(dy, x, ctx.dtype, 1, affine) if ctx.needs_input_grad[3] else None
        dx = fused_calls.input_gradient(g, x, shape, affine, terms.slope, terms.constant, NO_MASK)
        return dx, terms.weight, terms.bias, dw, None, None


class _SumConvolution(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0913 (autograd takes each tensor as a parameter)
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        shortcut: Tensor,
        conv_weight: Tensor,
        projection_weight: Tensor | None,
        stride: int,
        layer: NormLayer,
        moments: ChunkMoments | None,
    ) -> Any:
        affine, count = batch_affine(layer, x, moments)
        rounded = _round(conv_weight, x)
        y, partial, activated, bits = calls.sum_forward(x, affine, shortcut, rounded)
        ctx.group, ctx.stride, ctx.dtype = layer.group, stride, conv_weight.dtype
        ctx.set_materialize_grads(False)
        if projection_weight is None:
            ctx.save_for_backward(x, *affine, count, bits, activated, rounded, None)
            ctx.mark_non_differentiable(partial)
            return y, partial, activated
        projection = _round(projection_weight, x)
        projected, projected_partial = calls.forward(activated, projection, stride, None)
        ctx.save_for_backward(x, *affine, count, bits, activated, rounded, projection)
        ctx.mark_non_differentiable(partial, projected_partial)
        return y, partial, projected, projected_partial

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, _: Any, second: Tensor | None, *__: Any) -> tuple[Tensor | None, ...]:
        x, *affine_values, count, bits, activated, rounded, projection = ctx.saved_tensors
        affine, shape = Affine(*affine_values), ImageRows.of(x)
        if dy is None and second is None:
            return (None,) * 9
        dy = rounded.new_zeros(x.shape[0], rounded.shape[0], *x.shape[2:]) if dy is None else dy
        dy = nhwc_gradient(dy, x.dtype)
        second = None if second is None else nhwc_gradient(second, x.dtype)
        dw = dv = None
        if ctx.needs_input_grad[4]:
            dw = calls.weight_gradient(dy, activated, ctx.dtype, 1, None)
        if projection is not None and second is not None:
            if ctx.needs_input_grad[5]:
                dv = calls.weight_gradient(second, activated, ctx.dtype, ctx.stride, None)
            size = torch.Size((*activated.shape[:2], *second.shape[2:]))  # only the pixels that the stride takes
            second = calls.data_gradient(second, projection, size, 1)
        g, sums = calls.masked_data_gradient(dy, rounded, x, affine, bits=bits, second=second, second_stride=ctx.stride)
        terms = gradient_terms(ctx.group, sums, shape, affine, count)
        dx = fused_calls.input_gradient(g, x, shape, affine, terms.slope, terms.constant, NO_MASK)
        return dx, terms.weight, terms.bias, g, dw, dv, None, None, None
