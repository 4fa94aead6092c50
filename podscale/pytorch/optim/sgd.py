"""Stochastic gradient descent with momentum, Nesterov's form on request (Sutskever 2013, section 2)."""

import torch
from torch import Tensor

from podscale.pytorch.optim.base import HyperParams
from podscale.pytorch.optim.momentum import MomentumForm, build_momentum_update, momentum_factors
from podscale.pytorch.optim.share import ParamShard


class Sgd:
    """d = g + weight_decay * w, then momentum (see `Momentum`), scaled by default as in torch and in Goyal 2017.

    Scaled: m = momentum * m + d;  w -= rate * (d + momentum * m if nesterov else m). Unscaled, the rate stands inside
    the buffer, and a schedule of the momentum can correct for its changes (Goyal 2017, section 3; Codreanu 2017).
    """

    def __init__(self, shard: ParamShard, *, nesterov: bool, form: MomentumForm = "scaled") -> None:
        self._shard, self._form = shard, form
        self._momentum = build_momentum_update(shard, nesterov=nesterov)
        self.moments, self.scalars = {"momentum": self._momentum.values}, dict[str, Tensor]()

    @torch.no_grad()
    def step(self, hyper: HyperParams, finite: Tensor) -> Tensor:
        finite, _ = self._shard.sum_over_ranks(finite)
        inside, outside = momentum_factors(self._form, hyper.learning_rate, torch.ones_like(hyper.learning_rate))
        self._momentum.step(inside, outside, hyper.momentum, hyper.weight_decay, finite, decayed=False)
        return finite
