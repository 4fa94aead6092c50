"""Parameter shard of one rank, cut into chunks of single parameters, and norms of whole parameters.

An optimizer sees lists of tensors and does not depend on whether the step is sharded. Norms are taken of chunks, which
are small: a processor's fp32 sum of squares is accurate to 1e-7 over some ten thousand elements and only to 1e-5 over
millions. Element-wise work is done on parts. On a CPU a part is a chunk, and parts are processed in groups that stay in
the cache from one operation to the next. On a GPU, where every operation on a tensor is a launch, a part is a
range of the flat buffer in rows; a row is within one parameter, so a factor per parameter is one value per row.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from podscale.training.param_layout import ALIGNMENT_ELEMENTS

CHUNK_ELEMENTS = 2**15
"""Maximum length of a chunk, elements."""
GROUP_ELEMENTS = 2**17
"""Maximum length of a group of chunks on a CPU, elements: three fp32 arrays of it are 1.5 MiB."""


class ParamSlice(NamedTuple):
    """One parameter in the flat layout: elements [start, start + size).

    `shape` () stands for a vector. `strides` differ from the order of the elements if the parameter is channels-last.
    """

    name: str
    start: int
    size: int
    uses_weight_decay: bool
    uses_trust_ratio: bool
    is_batch_norm: bool = False
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()

    def view(self, flat: Tensor) -> Tensor:
        return flat.as_strided(self.shape or (self.size,), self.strides or (1,), flat.storage_offset() + self.start)


class Chunk(NamedTuple):
    """Chunk of one parameter: `size` elements from `flat_offset` of the flat layout.

    `local_offset` counts in buffers of this rank's elements only, `weight_offset` in the weights, which have one of the
    two layouts.
    """

    slice_index: int
    flat_offset: int
    local_offset: int
    size: int
    weight_offset: int


class PartGroup(NamedTuple):
    """Parts [first, last) of the shard, which a step processes together, and their chunks.

    `decayed_parts` are indices within the group; `masks` has 1 or 0 per row of each, or None if all of it decays.
    """

    first: int
    last: int
    weights: list[Tensor]
    gradients: list[Tensor]
    weight_chunks: list[Tensor]
    gradient_chunks: list[Tensor]
    decayed_parts: list[int]
    masks: list[Tensor | None]


class ParamShard:
    """Weights and gradients of one rank as views of the flat buffers.

    Args:
        weights: fp32, of the whole layout or of this rank's elements only.
        gradients: fp32, of the whole layout.
        sum_ranks: adds fp64 values over the ranks that share one set of weights, with the same bits on each; None if
            every rank steps all weights.
        rows: parts are ranges in rows; default: on a GPU.
    """

    def __init__(
        self,
        param_slices: Sequence[ParamSlice],
        local_ranges: Sequence[tuple[int, int]],
        weights: Tensor,
        gradients: Tensor,
        sum_ranks: Callable[[Tensor], Tensor] | None = None,
        *,
        rows: bool | None = None,
    ) -> None:
        self.param_slices, self._local_ranges, self._sum_ranks = list(param_slices), list(local_ranges), sum_ranks
        self.length = sum(stop - start for start, stop in local_ranges)
        self.device = gradients.device
        self.weights, self.gradients = weights, gradients
        self._is_compact = len(weights) != len(gradients)
        assert not self._is_compact or len(weights) == self.length
        self.chunks = cut_chunks(param_slices, local_ranges, compact=self._is_compact)
        self.slice_of_chunk = self._tensor([chunk.slice_index for chunk in self.chunks], torch.int64)
        self.uses_trust_ratio = self._tensor([each.uses_trust_ratio for each in param_slices], torch.bool)
        self.uses_weight_decay = self._tensor([each.uses_weight_decay for each in param_slices], torch.float32)
        in_rows = self.device.type != "cpu" if rows is None else rows
        slices = slice_of_rows(param_slices, local_ranges) if in_rows and self.chunks else []
        self._slice_of_rows = [indices.to(self.device) for indices in slices]
        self.groups = self._row_groups() if self._slice_of_rows else self._chunk_groups()

    def zeros(self) -> Tensor:
        """Return a buffer with one value for each of this rank's weights, in their dtype."""
        return torch.zeros(self.length, dtype=self.weights.dtype, device=self.device)

    def views(self, values: Tensor) -> list[list[Tensor]]:
        """Return the parts of `values`, a buffer as from `zeros`, group by group."""
        if self._slice_of_rows:
            return [[_as_rows(values, local, local + stop - start) for local, start, stop in self._range_offsets()]]
        return [[values.narrow(0, c.local_offset, c.size) for c in self.chunks[g.first : g.last]] for g in self.groups]

    def contiguous_chunks(self, *buffers: Tensor) -> list[tuple[Tensor, ...]]:
        """Return (weights, gradients, each buffer) of contiguous elements in order, across parameters and padding.

        For work with the same factors on all elements: on a CPU at most `GROUP_ELEMENTS` at a time, on a GPU ranges.
        """
        chunks = []
        for range_local, range_start, range_stop in self._range_offsets():
            step = range_stop - range_start if self._slice_of_rows else GROUP_ELEMENTS
            for start in range(range_start, range_stop, step or 1):
                size, local = min(step, range_stop - start), range_local + start - range_start
                weights = self.weights.narrow(0, local if self._is_compact else start, size)
                values = [buffer.narrow(0, local, size) for buffer in buffers]
                chunks.append((weights, self.gradients.narrow(0, start, size), *values))
        return chunks

    def per_part(self, factor: Tensor) -> list[Tensor]:
        """Return the factor of each part, from a `factor` for all parameters (scalar) or for each of them [slices]."""
        if self._slice_of_rows:
            return [factor.index_select(0, i)[:, None] if factor.dim() else factor for i in self._slice_of_rows]
        if factor.dim():
            factor = factor.index_select(0, self.slice_of_chunk)
        return list(factor.expand(len(self.chunks)).unbind())

    def sum_local(self, values: Sequence[Tensor]) -> Tensor:
        """Return the sum [1] of `values`, fp64 scalars of this rank's parts, of which there may be none."""
        total = torch.stack(list(values)).sum() if values else self.weights.new_zeros((), dtype=torch.float64)
        return total.view(1)

    def sum_over_ranks(self, finite: Tensor, *values: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return True if all ranks are `finite` (scalar), and the sums of `values`, fp64 vectors, by one message."""
        if self._sum_ranks is None:
            return finite, list(values)
        total = self._sum_ranks(torch.cat([(~finite).double().view(1), *values]))
        return total[0] == 0, list(total[1:].split([len(value) for value in values]))

    def mask_nonfinite(self, finite: Tensor) -> Tensor:
        """Return True if all ranks are `finite` (bool scalar); if not, zero the gradients on all of them."""
        all_finite, _ = self.sum_over_ranks(finite)
        if self._sum_ranks is not None:  # else the caller has zeroed them
            for group in self.groups:
                torch._foreach_mul_(group.gradients, all_finite.to(self.weights.dtype))
        return all_finite

    def _tensor(self, values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def _chunk_views(self) -> tuple[list[Tensor], list[Tensor]]:
        weights = [self.weights.narrow(0, chunk.weight_offset, chunk.size) for chunk in self.chunks]
        return weights, [self.gradients.narrow(0, chunk.flat_offset, chunk.size) for chunk in self.chunks]

    def _chunk_groups(self) -> list[PartGroup]:
        """Return groups in which every part is a chunk."""
        weights, gradients = self._chunk_views()
        groups = []
        for first, last in self._group_bounds():
            parts = (weights[first:last], gradients[first:last])
            slices = [self.param_slices[chunk.slice_index] for chunk in self.chunks[first:last]]
            decayed = [index for index, each in enumerate(slices) if each.uses_weight_decay]
            groups.append(PartGroup(first, last, *parts, *parts, decayed, [None] * len(decayed)))
        return groups

    def _group_bounds(self) -> list[tuple[int, int]]:
        if not self.chunks:  # in small models some ranks have no weights
            return []
        bounds, length = [0], 0
        for number, chunk in enumerate(self.chunks):
            if length + chunk.size > GROUP_ELEMENTS:
                bounds.append(number)
                length = 0
            length += chunk.size
        return list(pairwise([*bounds, len(self.chunks)]))

    def _row_groups(self) -> list[PartGroup]:
        """Return one group in which every part is a local range in rows."""
        spans = [(local, local + stop - start) for local, start, stop in self._range_offsets()]
        weights = [_as_rows(self.weights, *span) for span in (spans if self._is_compact else self._local_ranges)]
        gradients = [_as_rows(self.gradients, *span) for span in self._local_ranges]
        masks: list[Tensor | None] = [
            self.uses_weight_decay.index_select(0, indices)[:, None] for indices in self._slice_of_rows
        ]
        count = len(spans)
        return [PartGroup(0, count, weights, gradients, *self._chunk_views(), list(range(count)), masks)]

    def _range_offsets(self) -> list[tuple[int, int, int]]:
        """Return for each local range its first element in buffers of this rank's elements, its start and its stop."""
        offsets = accumulate((stop - start for start, stop in self._local_ranges), initial=0)
        return [(local, *span) for local, span in zip(offsets, self._local_ranges, strict=False)]


def cut_chunks(
    param_slices: Sequence[ParamSlice], local_ranges: Sequence[tuple[int, int]], *, compact: bool = False
) -> list[Chunk]:
    """Cut this rank's ranges into chunks of one parameter each, in order; `compact` weights hold only its elements."""
    chunks, range_local = [], 0
    by_start = sorted(enumerate(param_slices), key=lambda numbered: numbered[1].start)
    for range_start, range_stop in local_ranges:
        for index, each in by_start:
            slice_stop = min(range_stop, each.start + each.size)
            for start in range(max(range_start, each.start), slice_stop, CHUNK_ELEMENTS):
                local, size = range_local + start - range_start, min(CHUNK_ELEMENTS, slice_stop - start)
                chunks.append(Chunk(index, start, local, size, local if compact else start))
        range_local += range_stop - range_start
    return chunks


def slice_of_rows(param_slices: Sequence[ParamSlice], local_ranges: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Return the slice index of each row of each local range, int64 [rows]; padding counts as the first slice's.

    Every slice and every range begins with a row (see `ALIGNMENT_ELEMENTS`), so no row is in two slices.
    """
    row = ALIGNMENT_ELEMENTS
    indices = torch.zeros(-(-max(stop for _, stop in local_ranges) // row), dtype=torch.int64)
    for index, each in enumerate(param_slices):
        assert each.start % row == 0, each
        indices[each.start // row : -(-(each.start + each.size) // row)] = index
    assert all(start % row == 0 == stop % row for start, stop in local_ranges), local_ranges
    return [indices[start // row : stop // row] for start, stop in local_ranges]


def _as_rows(flat: Tensor, start: int, stop: int) -> Tensor:
    return flat[start:stop].view(-1, ALIGNMENT_ELEMENTS)


class ParamNorms:
    """Norms of parameters from the norms of their chunks, added up in fp64.

    Within a rank the sum is a product with a matrix of ones and zeros, whose order is fixed. If ranks hold different
    chunks, their sums are added in one small message (Kumar 2019; Xu 2020).
    """

    def __init__(self, shard: ParamShard) -> None:
        self._shard = shard
        indices = torch.arange(len(shard.param_slices), device=shard.device)
        self._membership = (shard.slice_of_chunk == indices[:, None]).double()

    def __call__(self, finite: Tensor, *chunk_norms: Sequence[Tensor] | Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return True if all ranks are `finite` (bool scalar), and the norms of the parameters, fp32 [slices] each."""
        squares = [self._membership @ self._stack(norms).square() for norms in chunk_norms]
        finite, sums = self._shard.sum_over_ranks(finite, *squares)
        return finite, [total.sqrt().to(self._shard.weights.dtype) for total in sums]

    def _stack(self, norms: Sequence[Tensor] | Tensor) -> Tensor:
        """Return fp64 [chunks]; a rank may have none."""
        if isinstance(norms, Tensor):
            return norms.double()
        return torch.stack(list(norms)).double() if norms else self._membership.new_zeros(0)
