"""Fused kernels without one of their parts, which operations of its own do then, to count the bytes that it saves."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from podscale.pytorch.batch_norm import BatchNorm, activations, fused, fused_calls, gemm, gemm_calls
from podscale.pytorch.batch_norm.activations import Convolved, norm_relu
from podscale.pytorch.batch_norm.fused_calls import MASK_OF_BITS, MASK_OF_X, Affine, ImageRows
from podscale.pytorch.optim import lars, sgd

resnet_module = import_module("podscale.pytorch.models.resnet")  # `models.resnet` is a function


@contextmanager
def _without_moments() -> Any:
    """Batch norm reads the images of a convolution for their moments."""
    with ExitStack() as stack:
        affine = fused.batch_affine
        for user in (fused, gemm):
            stack.enter_context(
                mock.patch.object(user, "batch_affine", lambda layer, x, moments=None: affine(layer, x))
            )
        yield


def _masked_data_gradient(
    gradient: Tensor,
    weight: Tensor,
    x: Tensor,
    affine: Affine,
    *,
    bits: Tensor | None = None,
    second: Tensor | None = None,
    second_stride: int = 1,
) -> tuple[Tensor, Tensor]:
    """Return the data gradient by one pass, mask and sums by another."""
    dx = gemm_calls.data_gradient(gradient, weight, x.shape, 1)
    if second is not None and second_stride > 1:
        second = torch.zeros_like(x)  # its pixels are spread over all
    relu = MASK_OF_X if bits is None else MASK_OF_BITS
    partial_sums, g = fused_calls.chunk_gradient_sums((dx, second), x, ImageRows.of(x), affine, relu, bits)
    return g, partial_sums


def _norm_relu_convolve(norm: BatchNorm, conv: nn.Module, x: Tensor | Convolved) -> Convolved:
    """Write the normalised images, and read them in the convolution."""
    return activations.convolve(conv, norm, norm_relu(norm, x))


WITHOUT: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "moments": _without_moments,
    "sums": partial(mock.patch.object, gemm_calls, "masked_data_gradient", _masked_data_gradient),
    "activation": partial(mock.patch.object, resnet_module, "norm_relu_convolve", _norm_relu_convolve),
    "block sum": partial(mock.patch.object, activations, "_begin_with_sum", lambda *values: None),
    "momentum": partial(mock.patch.object, lars, "build_momentum_update", sgd.ForeachMomentum),
}
