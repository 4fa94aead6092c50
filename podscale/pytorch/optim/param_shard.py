"""Parameter shard of one rank, cut into chunks of single parameters, and norms of whole parameters.

An optimizer sees lists of tensors and never knows whether the step is sharded. Norms are taken of chunks, which are
small: a processor's fp32 sum of squares is accurate to 1e-7 over some ten thousand elements and only to 1e-5 over
millions. Element-wise work is done on parts. On a CPU a part is a chunk, and parts are processed in groups that stay in
the cache from one operation to the next. On a GPU, where every operation on a tensor is a launch, a part is a whole
range of the flat buffer in rows; a row lies within one parameter, so a factor per parameter is one value per row.
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

    uses_weight_decay: whether weight decay applies. uses_trust_ratio: whether LARS and LAMB scale its rate.
    is_batch_norm: whether batch norm has it. shape, strides: those of the parameter, which channels-last filters have
    in another order than their elements; default: a vector's.
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
        """Its elements of a flat buffer, in its shape."""
        return flat.as_strided(self.shape or (self.size,), self.strides or (1,), flat.storage_offset() + self.start)


class Chunk(NamedTuple):
    """Chunk of one parameter.

    Args:
        slice_index: index of its `ParamSlice`.
        flat_offset: first element in the flat layout.
        local_offset: first element in buffers of this rank's elements only.
        size: elements.
        weight_offset: first element in the weights, which have one of the two layouts.
    """

    slice_index: int
    flat_offset: int
    local_offset: int
    size: int
    weight_offset: int


class ChunkGroup(NamedTuple):
    """Parts that an update takes together: numbers [first, last), and the pieces that they consist of.

    decayed_parts: the parts with weights that decay, from 0. masks: for each of those 1 or 0 per row; None where all of
    it decays.
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
    """The pieces of one rank as views of the flat buffers.

    weights: fp32, either of the whole layout or of this rank's elements alone. gradients: fp32 of the whole layout.
    local_ranges: this rank's ranges of the layout, in order. sum_ranks: adds fp64 values over the ranks that share one
    set of weights, to the same bits on each; None where every rank updates everything.
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
        """`rows`: whether parts are ranges in rows; default: on a GPU."""
        self.param_slices, self._sum_ranks = list(param_slices), sum_ranks
        self.length = sum(stop - start for start, stop in local_ranges)
        self.device = gradients.device
        self.weights, self.gradients = weights, gradients
        assert len(weights) in (len(gradients), self.length)
        self.chunks = cut_chunks(param_slices, local_ranges, compact=len(weights) != len(gradients))
        self.slice_of_chunk = torch.tensor([p.slice_index for p in self.chunks], dtype=torch.int64, device=self.device)
        self.uses_trust_ratio = torch.tensor([segment.uses_trust_ratio for segment in param_slices], device=self.device)
        self.uses_weight_decay = torch.tensor(
            [float(segment.uses_weight_decay) for segment in param_slices], device=self.device
        )
        self._local_ranges = list(local_ranges)
        in_rows = self.device.type != "cpu" if rows is None else rows
        self._rows = (
            [part.to(self.device) for part in slice_of_rows(param_slices, local_ranges)]
            if in_rows and self.chunks
            else []
        )
        own_weights = [weights.narrow(0, p.weight_offset, p.size) for p in self.chunks]
        own_gradients = [gradients.narrow(0, p.flat_offset, p.size) for p in self.chunks]
        make = self._row_groups if self._rows else self._chunk_groups
        self.groups = make(own_weights, own_gradients)

    def zeros(self) -> Tensor:
        """Room for one more fp32 value of each of this rank's weights."""
        return torch.zeros(self.length, device=self.device)

    def views(self, values: Tensor) -> list[list[Tensor]]:
        """The parts of such a buffer, group by group."""
        if self._rows:
            return [[_as_rows(values, own, own + stop - start) for own, (start, stop) in self._range_offsets()]]
        return [[values.narrow(0, p.local_offset, p.size) for p in self.chunks[g.first : g.last]] for g in self.groups]

    def contiguous_chunks(self, *own: Tensor) -> list[tuple[Tensor, ...]]:
        """(weights, gradients, of each such buffer) of this rank's elements in order, whatever segments they are of.

        For work with the same factors on all elements: on a CPU at most `GROUP_ELEMENTS` at a time, on a GPU whole
        ranges. Padding is among them.
        """
        found = []
        compact = len(self.weights) != len(self.gradients)
        for begin, (start, stop) in self._range_offsets():
            step = stop - start if self._rows else GROUP_ELEMENTS
            for at in range(start, stop, step or 1):
                size, within = min(step, stop - at), begin + at - start
                parts = [values.narrow(0, within, size) for values in own]
                weights = self.weights.narrow(0, within if compact else at, size)
                found.append((weights, self.gradients.narrow(0, at, size), *parts))
        return found

    def per_part(self, factor: Tensor) -> list[Tensor]:
        """A factor for all, or one for each segment, as what multiplies each part."""
        if self._rows:
            return [factor.index_select(0, part)[:, None] if factor.dim() else factor for part in self._rows]
        if factor.dim():
            factor = factor.index_select(0, self.slice_of_chunk)
        return list(factor.expand(len(self.chunks)).unbind())

    def sum_local(self, values: Sequence[Tensor]) -> Tensor:
        """Return the sum of fp64 scalars of this rank's parts (possibly none) as `sum_over_ranks` takes it: [1]."""
        found = torch.stack(list(values)).sum() if values else self.weights.new_zeros((), dtype=torch.float64)
        return found.view(1)

    def sum_over_ranks(self, finite: Tensor, *values: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Adds fp64 vectors over the ranks, and finds whether all of them are finite, in one small message."""
        if self._sum_ranks is None:
            return finite, list(values)
        total = self._sum_ranks(torch.cat([(~finite).double().view(1), *values]))
        return total[0] == 0, list(total[1:].split([len(value) for value in values]))

    def mask_nonfinite(self, finite: Tensor) -> Tensor:
        """Whether all ranks are finite; where one is not, gradients are zero on all of them."""
        agreed, _ = self.sum_over_ranks(finite)
        if self._sum_ranks is not None:  # else the caller has zeroed them
            for group in self.groups:
                torch._foreach_mul_(group.gradients, agreed.float())
        return agreed

    def _chunk_groups(self, weights: list[Tensor], gradients: list[Tensor]) -> list[ChunkGroup]:
        """Every piece as one part."""
        groups = []
        for first, last in self._group_bounds():
            parts = (weights[first:last], gradients[first:last])
            decaying = [
                i for i, p in enumerate(self.chunks[first:last]) if self.param_slices[p.slice_index].uses_weight_decay
            ]
            groups.append(ChunkGroup(first, last, *parts, *parts, decaying, [None] * len(decaying)))
        return groups

    def _row_groups(self, weights: list[Tensor], gradients: list[Tensor]) -> list[ChunkGroup]:
        """Every owned range as one part."""
        compact = len(self.weights) != len(self.gradients)
        places = [
            (own, own + stop - start) if compact else (start, stop) for own, (start, stop) in self._range_offsets()
        ]
        parts = (
            [_as_rows(self.weights, *place) for place in places],
            [_as_rows(self.gradients, *place) for place in self._local_ranges],
        )
        masks: list[Tensor | None] = [self.uses_weight_decay.index_select(0, part)[:, None] for part in self._rows]
        return [ChunkGroup(0, len(places), *parts, weights, gradients, list(range(len(places))), masks)]

    def _range_offsets(self) -> list[tuple[int, tuple[int, int]]]:
        """Where each owned range begins in buffers of the share alone, and the range."""
        sizes = [stop - start for start, stop in self._local_ranges]
        return list(zip(accumulate([0, *sizes]), self._local_ranges, strict=False))

    def _group_bounds(self) -> list[tuple[int, int]]:
        if not self.chunks:  # small models leave some ranks nothing
            return []
        bounds, taken = [0], 0
        for number, piece in enumerate(self.chunks):
            if taken + piece.size > GROUP_ELEMENTS:
                bounds.append(number)
                taken = 0
            taken += piece.size
        return list(pairwise([*bounds, len(self.chunks)]))


def cut_chunks(
    param_slices: Sequence[ParamSlice], local_ranges: Sequence[tuple[int, int]], *, compact: bool = False
) -> list[Chunk]:
    """Cut this rank's ranges into chunks of single parameters, at most `CHUNK_ELEMENTS` each, in layout order.

    Args:
        compact: the weights hold this rank's elements only.
    """
    pieces, own = [], 0
    by_start = sorted(range(len(param_slices)), key=lambda number: param_slices[number].start)
    for range_start, range_stop in local_ranges:
        for number in by_start:
            segment = param_slices[number]
            start, stop = max(range_start, segment.start), min(range_stop, segment.start + segment.size)
            for at in range(start, stop, CHUNK_ELEMENTS):
                within = own + at - range_start
                pieces.append(Chunk(number, at, within, min(CHUNK_ELEMENTS, stop - at), within if compact else at))
        own += range_stop - range_start
    return pieces


def slice_of_rows(param_slices: Sequence[ParamSlice], local_ranges: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Return the slice index of each row of each local range, int64 [rows]; padding counts as the first slice's.

    Every slice and every range begins with a row (see `ALIGNMENT_ELEMENTS`), so no row is in two slices.
    """
    length = max(stop for _, stop in local_ranges)
    segment_of = torch.zeros(-(-length // ALIGNMENT_ELEMENTS), dtype=torch.int64)
    for number, segment in enumerate(param_slices):
        assert segment.start % ALIGNMENT_ELEMENTS == 0, segment
        segment_of[segment.start // ALIGNMENT_ELEMENTS : -(-(segment.start + segment.size) // ALIGNMENT_ELEMENTS)] = (
            number
        )
    assert all(start % ALIGNMENT_ELEMENTS == 0 == stop % ALIGNMENT_ELEMENTS for start, stop in local_ranges), (
        local_ranges
    )
    return [segment_of[start // ALIGNMENT_ELEMENTS : stop // ALIGNMENT_ELEMENTS] for start, stop in local_ranges]


def _as_rows(flat: Tensor, start: int, stop: int) -> Tensor:
    return flat[start:stop].view(-1, ALIGNMENT_ELEMENTS)


class ParamNorms:
    """Adds up squares piece by piece and segment by segment, in fp64.

    Within a rank that is a product with a matrix of ones and zeros, whose order is fixed; where ranks hold different
    pieces, their sums are added in one small message (Kumar 2019; Xu 2020).
    """

    def __init__(self, shard: ParamShard) -> None:
        self._shard = shard
        numbers = torch.arange(len(shard.param_slices), device=shard.device)
        self._membership = (shard.slice_of_chunk == numbers[:, None]).double()

    def __call__(self, finite: Tensor, *chunk_norms: Sequence[Tensor] | Tensor) -> tuple[Tensor, list[Tensor]]:
        """Whether all ranks are `finite`, and the norm of each segment, fp32 [segments], from those of its pieces."""
        squares = [self._membership @ _stack_norms(norms, self._membership).square() for norms in chunk_norms]
        finite, sums = self._shard.sum_over_ranks(finite, *squares)
        return finite, [total.sqrt().float() for total in sums]


def _stack_norms(norms: Sequence[Tensor] | Tensor, like: Tensor) -> Tensor:
    """fp64 [pieces]; a rank may have none."""
    if isinstance(norms, Tensor):
        return norms.double()
    return torch.stack(list(norms)).double() if norms else like.new_zeros(0)
