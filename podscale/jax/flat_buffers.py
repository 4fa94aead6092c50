"""Flat fp32 buckets of named arrays in one fixed layout, for all-reduce and optimizer.

Backward reaches the last layers first, so the layout runs backwards: the first bucket can be reduced while the rest of
backward is still computed. Every array begins a row of `ROW_ELEMENTS` elements, so that no row holds parts of two.

Filters are stored as a TPU's convolutions take them, [height, width, inputs, outputs]. In the model spec's order the
3 x 3 of a filter would be the fastest dimension, and the TPU compiler would spend half of a step on transposing filters
and their gradients.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from podscale.models import Shape
from podscale.training.param_layout import plan_buckets

ROW_ELEMENTS = 1024
"""Length of a row, elements: one fp32 tile of a TPU's memory, 8 x 128."""

TO_BUCKETS, FROM_BUCKETS = (2, 3, 1, 0), (3, 2, 0, 1)
"""Permutations of a filter [outputs, inputs, height, width] into the order of a bucket, and back."""

Values = npt.NDArray[Any]
Buckets = tuple[Array, ...]
"""Flat fp32 arrays, one per bucket: unsharded, or this device's shard of each."""


class ParamLayout:
    """Layout of arrays of these shapes in buckets, padded with zeros so that `shards` divide their rows."""

    def __init__(self, shapes: Mapping[str, Shape], *, bucket_elements: int, shards: int = 1) -> None:
        self.shapes = dict(shapes)
        backwards = list(reversed(self.shapes))
        sizes = [prod(self.shapes[name]) for name in backwards]
        plan = plan_buckets(sizes, bucket_elements, shards * ROW_ELEMENTS, alignment=ROW_ELEMENTS)
        self.lengths = tuple(stop - start for start, stop in plan.bounds)
        self._offsets = dict(zip(backwards, zip(plan.buckets, plan.starts, sizes, strict=True), strict=True))
        self._bounds = plan.bounds

    def pack(self, arrays: Mapping[str, ArrayLike], dtype: DTypeLike = jnp.float32) -> Buckets:
        """Pack `arrays` (by name) into buckets of `dtype`, padded with zeros."""
        parts: list[list[Array]] = [[] for _ in self._bounds]
        ends = [start for start, _ in self._bounds]
        for name, (bucket, start, size) in self._offsets.items():
            gap = start - ends[bucket]
            parts[bucket] += [jnp.zeros(gap, dtype)] * (gap > 0) + [
                to_bucket_order(jnp.asarray(arrays[name], dtype)).ravel()
            ]
            ends[bucket] = start + size
        for part, end, (_, stop) in zip(parts, ends, self._bounds, strict=True):
            part += [jnp.zeros(stop - end, dtype)] * (stop > end)
        return tuple(jnp.concatenate(part) for part in parts)

    def pack_on_host(self, arrays: Mapping[str, ArrayLike]) -> tuple[Values, ...]:
        """Pack `arrays` (by name) into fp32 buckets in host memory; missing arrays are zero."""
        buckets = [np.zeros(length, np.float32) for length in self.lengths]
        for name in arrays:
            bucket, start, size = self._offsets[name]
            start -= self._bounds[bucket][0]
            buckets[bucket][start : start + size] = to_bucket_order(np.asarray(arrays[name], np.float32)).ravel()
        return tuple(buckets)

    def unpack(self, buckets: Sequence[Any]) -> dict[str, Any]:
        """Return the arrays of unsharded buckets, in the order of the shapes; views or copies of host buckets."""
        arrays = {}
        for name, shape in self.shapes.items():
            bucket, start, size = self._offsets[name]
            start -= self._bounds[bucket][0]
            arrays[name] = from_bucket_order(buckets[bucket][start : start + size], shape)
        return arrays

    def array_of_rows(self) -> list[npt.NDArray[np.int32]]:
        """Return the index of the array, in the order of the shapes, of each row of each bucket.

        Rows of padding count as rows of the array before them.
        """
        numbers = {name: number for number, name in enumerate(self.shapes)}
        rows = []
        for bucket, (low, high) in enumerate(self._bounds):
            starts = [(start - low, numbers[name]) for name, (b, start, _) in self._offsets.items() if b == bucket]
            pairs = pairwise([*starts, (high - low, -1)])
            counts = [((stop - start) // ROW_ELEMENTS, number) for (start, number), (stop, _) in pairs]
            rows.append(np.concatenate([np.full(count, number, np.int32) for count, number in counts]))
        return rows


def to_bucket_order(array: Any) -> Any:
    """Transpose a filter into the order of a bucket; other arrays stay as they are."""
    return array.transpose(TO_BUCKETS) if array.ndim == len(TO_BUCKETS) else array


def from_bucket_order(flat: Any, shape: Shape) -> Any:
    """Return the array of a part of a bucket, contiguous if it is in host memory."""
    if len(shape) != len(TO_BUCKETS):
        return flat.reshape(shape)
    array = flat.reshape([shape[dim] for dim in TO_BUCKETS]).transpose(FROM_BUCKETS)
    return np.ascontiguousarray(array) if isinstance(array, np.ndarray) else array
