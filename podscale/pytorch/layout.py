"""A fixed layout of named tensors in one flat buffer, cut into buckets."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

import torch
from torch import Tensor

ALIGNMENT = 32
"""Every tensor starts at a multiple of this many elements: 128 bytes of fp32, so that kernels read whole vectors."""


@dataclass(frozen=True)
class Layout:
    """Where each tensor lies: tensor i is flat[starts[i] : starts[i] + sizes[i]], in bucket buckets[i].

    Depends on sizes and options alone, never on timing, so that a resumed run adds in the order of the run before it.
    """

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    buckets: tuple[int, ...]
    bounds: tuple[tuple[int, int], ...]
    """[start, stop) of each bucket; every bucket's length is a multiple of the `multiple` asked for."""

    @property
    def length(self) -> int:
        return self.bounds[-1][1]


def plan_layout(sizes: Sequence[int], bucket_elements: int, multiple: int, *, last_apart: bool = False) -> Layout:
    """Fills buckets in the order of `sizes`; a tensor larger than a bucket gets one of its own.

    Buckets are padded to a multiple of `multiple` (the shards of a sharded update). With `last_apart` the last tensor
    does not share its bucket.
    """
    unit = lcm(multiple, ALIGNMENT)
    starts, buckets, bounds = [], [], []
    bucket_start = position = 0
    for number, size in enumerate(sizes):
        apart = last_apart and number == len(sizes) - 1
        if position > bucket_start and (apart or position + size - bucket_start > bucket_elements):
            position = _round_up(position, unit)
            bounds.append((bucket_start, position))
            bucket_start = position
        starts.append(position)
        buckets.append(len(bounds))
        position = _round_up(position + size, ALIGNMENT)
    bounds.append((bucket_start, bucket_start + _round_up(position - bucket_start, unit)))
    return Layout(tuple(starts), tuple(sizes), tuple(buckets), tuple(bounds))


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


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
