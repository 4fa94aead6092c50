"""A fixed layout of named tensors in one flat buffer, cut into buckets; both engines lay out gradients by it."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

ALIGNMENT_ELEMENTS = 32
"""Every tensor starts at a multiple of this many elements: 128 bytes of fp32, so that kernels read whole vectors."""


@dataclass(frozen=True)
class BucketLayout:
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


def plan_buckets(
    sizes: Sequence[int],
    bucket_elements: int,
    multiple: int,
    *,
    isolate_last: bool = False,
    alignment: int = ALIGNMENT_ELEMENTS,
) -> BucketLayout:
    """Fills buckets in the order of `sizes`; a tensor larger than a bucket gets one of its own.

    Buckets are padded to a multiple of `multiple` (the shards of a sharded update). With `last_apart` the last tensor
    does not share its bucket. `alignment`: of every tensor's beginning.
    """
    unit = lcm(multiple, alignment)
    starts, buckets, bounds = [], [], []
    bucket_start = position = 0
    for number, size in enumerate(sizes):
        apart = isolate_last and number == len(sizes) - 1
        if position > bucket_start and (apart or position + size - bucket_start > bucket_elements):
            position = _round_up(position, unit)
            bounds.append((bucket_start, position))
            bucket_start = position
        starts.append(position)
        buckets.append(len(bounds))
        position = _round_up(position + size, alignment)
    bounds.append((bucket_start, bucket_start + _round_up(position - bucket_start, unit)))
    return BucketLayout(tuple(starts), tuple(sizes), tuple(buckets), tuple(bounds))


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
