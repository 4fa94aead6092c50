"""Tensors as views of a flat buffer (see `podscale.training.param_layout`), in the memory order of the model's parameters."""

import torch
from torch import Tensor


def view_like(flat: Tensor, start: int, like: Tensor) -> Tensor:
    """The elements of `flat` from `start` in the shape of `like` and, for channels-last filters, its memory order."""
    part = flat[start : start + like.numel()]
    if like.dim() == 4 and like.is_contiguous(memory_format=torch.channels_last) and not like.is_contiguous():
        outputs, inputs, height, width = like.shape
        return part.view(outputs, height, width, inputs).permute(0, 3, 1, 2)
    return part.view(like.shape)


def strided_like(tensor: Tensor, like: Tensor) -> Tensor:
    """The same elements with the strides of `like`, where the two differ in dimensions of size 1 alone.

    A 1x1 filter in NHWC order has other strides there than its view, and one such pair in a list makes torch copy all
    of the list one by one.
    """
    if tensor.stride() == like.stride():
        return tensor
    pairs = zip(tensor.shape, tensor.stride(), like.stride(), strict=True)
    if all(size == 1 or mine == other for size, mine, other in pairs):
        return tensor.as_strided(like.shape, like.stride())
    return tensor
