"""Layer-wise adaptive rate scaling (You 2017, algorithm 1) in the variants that published runs used.

ratio = eta * |w| / (|g| + weight_decay * |w| + eps), 1 if a norm is zero;  d = g + weight_decay * w
unscaled: m = momentum * m + rate * ratio * d;  w -= m, or with Nesterov w -= momentum * m + rate * ratio * d.

`eta` is the trust coefficient, `rate` the learning rate. With `norm_of_sum` the denominator is |d| + eps, with
`l2_in_loss` |d| + weight_decay * |w| + eps. The other forms move `ratio` and `rate` out of the buffer m (see
`MomentumForm`).

| as in                     | trust        | form         | eps  | parameters with ratio      | clip |
|---------------------------|--------------|--------------|------|----------------------------|------|
| MLPerf reference, TF 1.15 | sum_of_norms | unscaled     | 0    | all but batch norm, biases | no   |
| Google, 2018 to mid-2019  | l2_in_loss   | scaled       | 0    | all but batch norm, biases | no   |
| Kumar 2019, "scaled"      | l2_in_loss   | scaled       | 1e-5 | all but batch norm, biases | no   |
| optax                     | norm_of_sum  | unscaled     | 0    | all (decay_all)            | no   |
| timm                      | sum_of_norms | ratio_inside | 1e-8 | decayed; all if adapt_all  | LARC |

Parameters without a ratio do not decay either, except for biases with decay_biases, which Google's code of 2018 has
too. With adapt_all, batch norm and biases have a ratio but do not decay.

Google's code of 2018 (tensorflow/tpu f4fa4d7, with the optimizer of tensorflow 5c8077a) adds the L2 term of all
variables but batch norm's to the loss, so that d is what the optimizer gets as the gradient. The optimizer adds
weight_decay * |w| to its norm, but nothing to d. The L2 term left the loss of runs with LARS in f59154b of 2019-08-16.
Kumar's eps is that of Google's MLPerf 0.6 submission from 512 cores on.
"""

from typing import Literal

import torch
from torch import Tensor

from podscale.pytorch.optim.base import HyperParams, Optimizer
from podscale.pytorch.optim.param_shard import ParamNorms, ParamShard
from podscale.pytorch.optim.sgd import MomentumForm, build_momentum_update, momentum_factors

TrustForm = Literal["sum_of_norms", "norm_of_sum", "l2_in_loss"]


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
        of_sum = self._trust != "sum_of_norms"
        finite, (w, g) = self._norms(finite, *self._momentum.norms(hyper.weight_decay, of_sum=of_sum))
        inside, outside = momentum_factors(self._form, hyper.learning_rate, self._trust_ratio(w, g, hyper))
        self._momentum.step(inside, outside, hyper.momentum, hyper.weight_decay, finite, decayed=of_sum)
        return finite

    def _trust_ratio(self, w: Tensor, g: Tensor, hyper: HyperParams) -> Tensor:
        """Return the trust ratio of each parameter, fp32 [slices], from the norms of weights and gradients."""
        denominator = g + self._eps
        if self._trust != "norm_of_sum":
            denominator = denominator + hyper.weight_decay * self._shard.uses_weight_decay * w
        ratio = torch.where((w > 0) & (g > 0), self._trust_coefficient * w / denominator, 1.0)
        if self._clip:
            ratio = (ratio / hyper.learning_rate).clamp(max=1.0)
        return torch.where(self._shard.uses_trust_ratio, ratio, 1.0)
