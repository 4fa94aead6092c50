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

    def __init__(self, share: ParamShard) -> None:
        self._share = share
        numbers = torch.arange(len(share.segments), device=share.device)
        self._membership = (share.segment_of == numbers[:, None]).double()

    def __call__(self, finite: Tensor, *pieces: Sequence[Tensor] | Tensor) -> tuple[Tensor, list[Tensor]]:
        """Whether all ranks are `finite`, and the norm of each segment, fp32 [segments], from those of its pieces."""
        squares = [self._membership @ _stack_norms(norms, self._membership).square() for norms in pieces]
        finite, sums = self._share.agree(finite, *squares)
        return finite, [total.sqrt().float() for total in sums]


def _stack_norms(norms: Sequence[Tensor] | Tensor, like: Tensor) -> Tensor:
    """fp64 [pieces]; a rank may have none."""
    if isinstance(norms, Tensor):
        return norms.double()
    return torch.stack(list(norms)).double() if norms else like.new_zeros(0)
