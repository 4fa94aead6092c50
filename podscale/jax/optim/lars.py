"""Layer-wise adaptive rate scaling (You 2017, algorithm 1) in the variants that published runs used.

ratio = eta * |w| / (|g| + weight_decay * |w| + eps), 1 if a norm is zero;  d = g + weight_decay * w
unscaled: m = momentum * m + rate * ratio * d;  w -= m, or with Nesterov w -= momentum * m + rate * ratio * d.
With `norm_of_sum` the denominator is |d| + eps, with `l2_in_loss` |d| + weight_decay * |w| + eps.
`podscale.pytorch.optim.lars` has the table of runs and their variants.
"""

from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
from jax import Array

from podscale.jax.flat_buffers import Buckets
from podscale.jax.optim.base import HyperParams, Optimizer, OptimizerResult, OptState, ParamShard
from podscale.jax.optim.sgd import MomentumForm, MomentumUpdate, add_weight_decay

TrustForm = Literal["sum_of_norms", "norm_of_sum", "l2_in_loss"]


@dataclass(frozen=True)
class Lars(Optimizer):
    """LARS (see the module). Norms are those of unsharded fp32 arrays, after averaging over the devices.

    Arrays without trust ratio have ratio 1, which leaves plain momentum. With `clip` (LARC) the ratio is
    min(ratio / rate, 1), so that no layer moves faster than the learning rate.
    """

    nesterov: bool
    trust_coefficient: float
    eps: float = 0.0
    trust: TrustForm = "sum_of_norms"
    form: MomentumForm = "unscaled"
    clip: bool = False

    def step(
        self,
        shard: ParamShard,
        weights: Buckets,
        gradients: Buckets,
        opt_state: OptState,
        hyper: HyperParams,
        finite: Array,
    ) -> OptimizerResult:
        directions = add_weight_decay(shard, weights, gradients, hyper.weight_decay)
        finite, (w, g) = shard.norms(finite, weights, gradients if self.trust == "sum_of_norms" else directions)
        ratio = self._trust_ratio(shard, w, g, hyper)
        momentum = MomentumUpdate(self.form, self.nesterov)
        return momentum.step(shard, weights, directions, opt_state, hyper, finite, ratio)

    def _trust_ratio(self, shard: ParamShard, w: Array, g: Array, hyper: HyperParams) -> Array:
        """Return the trust ratio of each array, fp32 [arrays], from the norms of weights and gradients."""
        denominator = g + self.eps
        if self.trust != "norm_of_sum":
            denominator += hyper.weight_decay * shard.uses_weight_decay * w
        ratio = jnp.where((w > 0) & (g > 0), self.trust_coefficient * w / denominator, 1.0)
        if self.clip:
            ratio = jnp.minimum(ratio / hyper.learning_rate, 1.0)
        return jnp.where(shard.uses_trust_ratio, ratio, 1.0)
