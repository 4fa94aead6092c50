"""Layer-wise adaptive rate scaling (You 2017, algorithm 1) in the variants that published runs used.

ratio = eta * |w| / (|g| + weight_decay * |w| + eps), 1 if a norm is zero;  d = g + weight_decay * w
unscaled: m = momentum * m + rate * ratio * d;  w -= m, or with Nesterov w -= momentum * m + rate * ratio * d.

`eta` is the trust coefficient, `rate` the learning rate. With `norm_of_sum` the denominator is |d| + eps. The other
forms move `ratio` and `rate` out of the buffer m (see `MomentumForm`).

| as in                     | trust        | form         | eps  | parameters with ratio      | clip |
|---------------------------|--------------|--------------|------|----------------------------|------|
| MLPerf reference, TF 1.15 | sum_of_norms | unscaled     | 0    | all but batch norm, biases | no   |
| Kumar 2019, "scaled"      | sum_of_norms | scaled       | 1e-5 | all but batch norm, biases | no   |
| optax                     | norm_of_sum  | unscaled     | 0    | all (decay_all)            | no   |
| timm                      | sum_of_norms | ratio_inside | 1e-8 | decayed; all if adapt_all  | LARC |

Parameters without a ratio do not decay either. With adapt_all, batch norm and biases have a ratio but do not decay.
(Kumar's eps is that of Google's MLPerf 0.6 submission from 512 cores on.)
"""

from typing import Literal

import torch
from torch import Tensor

from podscale.pytorch.optim.base import HyperParams, Optimizer
from podscale.pytorch.optim.param_shard import ParamNorms, ParamShard
from podscale.pytorch.optim.sgd import MomentumForm, build_momentum_update, momentum_factors

TrustForm = Literal["sum_of_norms", "norm_of_sum"]


class Lars(Optimizer):
    """LARS (see the module). Norms are those of whole parameters in fp32, after averaging over the ranks.

    Parameters without trust ratio have ratio 1, which leaves plain momentum. With `clip` (LARC) the ratio is
    min(ratio / rate, 1), so that no layer moves faster than the learning rate.
    """

    def __init__(
        self,
        shard: ParamShard,
        *,
        nesterov: bool,
        trust_coefficient: float,
        eps: float = 0.0,
        trust: TrustForm = "sum_of_norms",
        form: MomentumForm = "unscaled",
        clip: bool = False,
    ) -> None:
        self._shard, self._norms = shard, ParamNorms(shard)
        self._trust_coefficient, self._eps, self._trust = trust_coefficient, eps, trust
        self._form, self._clip = form, clip
        self._momentum = build_momentum_update(shard, nesterov=nesterov)
        self.moments, self.scalars = {"momentum": self._momentum.values}, dict[str, Tensor]()

    @torch.no_grad()
    def step(self, hyper: HyperParams, finite: Tensor) -> Tensor:
        of_sum = self._trust == "norm_of_sum"
        finite, (w, g) = self._norms(finite, *self._momentum.norms(hyper.weight_decay, of_sum=of_sum))
        inside, outside = momentum_factors(self._form, hyper.learning_rate, self._trust_ratio(w, g, hyper))
        self._momentum.step(inside, outside, hyper.momentum, hyper.weight_decay, finite, decayed=of_sum)
        return finite

    def _trust_ratio(self, w: Tensor, g: Tensor, hyper: HyperParams) -> Tensor:
        """Return the trust ratio of each parameter, fp32 [slices], from the norms of weights and gradients."""
        denominator = g + self._eps
        if self._trust == "sum_of_norms":
            denominator = denominator + hyper.weight_decay * self._shard.uses_weight_decay * w
        ratio = torch.where((w > 0) & (g > 0), self._trust_coefficient * w / denominator, 1.0)
        if self._clip:
            ratio = (ratio / hyper.learning_rate).clamp(max=1.0)
        return torch.where(self._shard.uses_trust_ratio, ratio, 1.0)
