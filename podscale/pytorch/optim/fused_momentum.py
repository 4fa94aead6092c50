"""Momentum on a GPU in two passes over the memory where lists of operations take about ten: two Triton kernels.

A program takes one piece. The first kernel reads weights and gradients for their norms; the second reads them and the
momentum, and writes weights and momentum: seven times 4 bytes for each weight in all, which at the 4.8 TB/s of an H200
takes at least 0.15 ms for ResNet-50. Chunks are read up to the next multiple of `ALIGNMENT_ELEMENTS`, which only
reaches padding, so that whole vectors are read; padding is zero and stays so.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from podscale.pytorch.optim.param_shard import ParamShard
from podscale.training.param_layout import ALIGNMENT_ELEMENTS

BLOCK_ELEMENTS = 2048
"""Elements that a program takes at a time."""


@triton.jit  # type: ignore[untyped-decorator]
def _norms_kernel(  # type: ignore[no-untyped-def]
    weights, gradients, table, decays, of_weights, of_gradients, of_sum: tl.constexpr, block: tl.constexpr
):
    piece = tl.program_id(0)
    segment, size = tl.load(table + 5 * piece), tl.multiple_of(tl.load(table + 5 * piece + 1), 32)
    at_weight = tl.multiple_of(tl.load(table + 5 * piece + 2), 32)
    at_gradient = tl.multiple_of(tl.load(table + 5 * piece + 3), 32)
    decay = tl.load(decays + segment)
    w_squares, g_squares = tl.zeros([block], tl.float32), tl.zeros([block], tl.float32)
    for start in range(0, size, block):
        places = start + tl.arange(0, block)
        w = tl.load(weights + at_weight + places, mask=places < size, other=0.0)
        g = tl.load(gradients + at_gradient + places, mask=places < size, other=0.0)
        if of_sum:
            g += decay * w
        w_squares += w * w
        g_squares += g * g
    tl.store(of_weights + piece, tl.sqrt(tl.sum(w_squares)))
    tl.store(of_gradients + piece, tl.sqrt(tl.sum(g_squares)))


@triton.jit  # type: ignore[untyped-decorator]
def _momentum_kernel(  # type: ignore[no-untyped-def]
    weights,
    gradients,
    momenta,
    table,
    decays,
    insides,
    outsides,
    momentum,
    finite,
    nesterov: tl.constexpr,
    block: tl.constexpr,
):
    if tl.load(finite) != 0:
        piece = tl.program_id(0)
        segment, size = tl.load(table + 5 * piece), tl.multiple_of(tl.load(table + 5 * piece + 1), 32)
        at_weight = tl.multiple_of(tl.load(table + 5 * piece + 2), 32)
        at_gradient = tl.multiple_of(tl.load(table + 5 * piece + 3), 32)
        at_momentum = tl.multiple_of(tl.load(table + 5 * piece + 4), 32)
        decay, inside, outside = tl.load(decays + segment), tl.load(insides + segment), tl.load(outsides + segment)
        keep = tl.load(momentum)
        for start in range(0, size, block):
            places = start + tl.arange(0, block)
            w = tl.load(weights + at_weight + places, mask=places < size)
            g = tl.load(gradients + at_gradient + places, mask=places < size)
            m = tl.load(momenta + at_momentum + places, mask=places < size)
            u = inside * (g + decay * w)
            m = keep * m + u
            tl.store(momenta + at_momentum + places, m, mask=places < size)
            step = u + keep * m if nesterov else m
            tl.store(weights + at_weight + places, w - outside * step, mask=places < size)


class FusedMomentum:
    """`MomentumUpdate` in two Triton kernels. Leaves the gradients unchanged."""

    def __init__(self, shard: ParamShard, *, nesterov: bool) -> None:
        self._shard, self._nesterov = shard, nesterov
        self.values = shard.zeros()
        rows = [
            (
                p.slice_index,
                -(-p.size // ALIGNMENT_ELEMENTS) * ALIGNMENT_ELEMENTS,
                p.weight_offset,
                p.flat_offset,
                p.local_offset,
            )
            for p in shard.chunks
        ]
        assert all(place % ALIGNMENT_ELEMENTS == 0 for row in rows for place in row[1:])
        self._table = torch.tensor(rows, dtype=torch.int64, device=shard.device).view(-1)

    def compile(self) -> None:
        """Compiles by a masked update, which changes nothing; raises where Triton finds no C compiler or headers."""
        nothing = torch.zeros((), device=self._shard.device)
        self.step(nothing, nothing, nothing, nothing, nothing, decayed=False)

    def norms(self, weight_decay: Tensor, *, of_sum: bool) -> tuple[Tensor, Tensor]:
        share, (w, g) = self._shard, torch.empty(2, len(self._shard.chunks), device=self._shard.device)
        decays = weight_decay * share.uses_weight_decay
        if share.chunks:
            _norms_kernel[(len(share.chunks),)](
                share.weights,
                share.gradients,
                self._table,
                decays,
                w,
                g,
                of_sum=of_sum,
                block=BLOCK_ELEMENTS,
                num_warps=8,
            )
        return w, g

    def step(
        self, inside: Tensor, outside: Tensor, momentum: Tensor, weight_decay: Tensor, finite: Tensor, *, decayed: bool
    ) -> None:
        share, segments = self._shard, len(self._shard.param_slices)
        if share.chunks:
            _momentum_kernel[(len(share.chunks),)](
                share.weights,
                share.gradients,
                self.values,
                self._table,
                weight_decay * share.uses_weight_decay,
                inside.expand(segments).contiguous(),
                outside.expand(segments).contiguous(),
                momentum,
                finite.to(torch.int32),
                nesterov=self._nesterov,
                block=BLOCK_ELEMENTS,
                num_warps=8,
            )
