"""What one rank updates: all weights, or its shard of every bucket, cut into pieces of single parameters.

An update rule sees lists of pieces and never knows whether the update is sharded. Pieces are small, because a
processor's fp32 sum of squares is good to 1e-7 over some ten thousand elements and to 1e-5 only over millions; and on
a CPU they are taken in groups that stay in its cache from one operation to the next.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

PIECE = 2**15
"""Most elements of a piece."""
CACHED = 2**17
"""Most elements of a group of pieces on a CPU: three fp32 arrays of them are 1.5 MiB."""


class Segment(NamedTuple):
    """One parameter in the flat layout: elements [start, start + size).

    decays: whether weight decay applies. adapts: whether LARS and LAMB scale its rate.
    """

    name: str
    start: int
    size: int
    decays: bool
    adapts: bool


class Piece(NamedTuple):
    """`size` elements of one segment: from `at` in the flat layout, from `own` in buffers of the share alone.

    weight: where they begin in the weights, which are laid out in one of the two ways.
    """

    segment: int
    at: int
    own: int
    size: int
    weight: int


class Group(NamedTuple):
    """Pieces that an update takes together: numbers [first, last), and those of them that decay, from 0."""

    first: int
    last: int
    weights: list[Tensor]
    gradients: list[Tensor]
    decaying: list[int]


class Share:
    """The pieces of one rank as views of the flat buffers.

    weights: fp32, either of the whole layout or of this rank's elements alone. gradients: fp32 of the whole layout.
    owned: this rank's ranges of the layout, in order. exchange: adds fp64 values over the ranks that share one set of
    weights, to the same bits on each; None where every rank updates everything.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        owned: Sequence[tuple[int, int]],
        weights: Tensor,
        gradients: Tensor,
        exchange: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.segments, self._exchange = list(segments), exchange
        self.length = sum(stop - start for start, stop in owned)
        self.device = gradients.device
        self.weights, self.gradients = weights, gradients
        assert len(weights) in (len(gradients), self.length)
        self.pieces = cut(segments, owned, compact=len(weights) != len(gradients))
        own_weights = [weights.narrow(0, p.weight, p.size) for p in self.pieces]
        own_gradients = [gradients.narrow(0, p.at, p.size) for p in self.pieces]
        self.segment_of = torch.tensor([p.segment for p in self.pieces], dtype=torch.int64, device=self.device)
        self.adapts = torch.tensor([segment.adapts for segment in segments], device=self.device)
        self.decays = torch.tensor([float(segment.decays) for segment in segments], device=self.device)
        self.groups = [
            Group(
                first,
                last,
                own_weights[first:last],
                own_gradients[first:last],
                [i for i, p in enumerate(self.pieces[first:last]) if segments[p.segment].decays],
            )
            for first, last in self._group_bounds()
        ]

    def zeros(self) -> Tensor:
        """Room for one more fp32 value of each of this rank's weights."""
        return torch.zeros(self.length, device=self.device)

    def views(self, values: Tensor) -> list[list[Tensor]]:
        """The pieces of such a buffer, group by group."""
        return [[values.narrow(0, p.own, p.size) for p in self.pieces[g.first : g.last]] for g in self.groups]

    def per_piece(self, factor: Tensor) -> list[Tensor]:
        """A factor for all, or one for each segment, as one scalar for each piece."""
        if factor.dim():
            factor = factor.index_select(0, self.segment_of)
        return list(factor.expand(len(self.pieces)).unbind())

    def agree(self, finite: Tensor, *values: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Adds fp64 vectors over the ranks, and finds whether all of them are finite, in one small message."""
        if self._exchange is None:
            return finite, list(values)
        total = self._exchange(torch.cat([(~finite).double().view(1), *values]))
        return total[0] == 0, list(total[1:].split([len(value) for value in values]))

    def _group_bounds(self) -> list[tuple[int, int]]:
        if self.device.type != "cpu" or not self.pieces:  # small models leave some ranks nothing
            return [(0, len(self.pieces))] if self.pieces else []
        bounds, taken = [0], 0
        for number, piece in enumerate(self.pieces):
            if taken + piece.size > CACHED:
                bounds.append(number)
                taken = 0
            taken += piece.size
        return list(pairwise([*bounds, len(self.pieces)]))


def cut(segments: Sequence[Segment], owned: Sequence[tuple[int, int]], *, compact: bool = False) -> list[Piece]:
    """The owned parts of all segments in the order of the layout, at most `PIECE` elements each.

    compact: whether the weights are this rank's elements alone.
    """
    pieces, own = [], 0
    by_start = sorted(range(len(segments)), key=lambda number: segments[number].start)
    for range_start, range_stop in owned:
        for number in by_start:
            segment = segments[number]
            start, stop = max(range_start, segment.start), min(range_stop, segment.start + segment.size)
            for at in range(start, stop, PIECE):
                within = own + at - range_start
                pieces.append(Piece(number, at, within, min(PIECE, stop - at), within if compact else at))
        own += range_stop - range_start
    return pieces
