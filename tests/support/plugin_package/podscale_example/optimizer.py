"""SGD by the sign of a running average of the gradient (Bernstein 2018, signum)."""

import torch
from torch import Tensor

from podscale.pytorch.optim import HyperParams, ParamShard


class SignSgd:
    """m = b m + (1 - b) g;  w -= rate * scale * sign(m)."""

    def __init__(self, shard: ParamShard, scale: float = 0.01) -> None:
        self._shard, self._scale = shard, scale
        self._average = shard.zeros()
        self.moments = {"average": self._average}
        self.scalars: dict[str, Tensor] = {}

    @torch.no_grad()
    def step(self, hyper: HyperParams, finite: Tensor) -> Tensor:
        finite = self._shard.mask_nonfinite(finite)
        length = torch.where(finite, hyper.learning_rate * self._scale, 0.0)
        for weights, gradients, average in self._shard.contiguous_chunks(self._average):
            average.copy_(torch.where(finite, torch.lerp(gradients, average, hyper.momentum), average))
            weights.sub_(length * average.sign())
        return finite
