"""Norms of whole parameters, of which a rank may hold only some pieces."""

from collections.abc import Sequence

import torch
from torch import Tensor

from podscale.pytorch.optim.share import ParamShard


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
