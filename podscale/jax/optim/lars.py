"""Layer-wise adaptive rate scaling (You 2017, algorithm 1) in the variants that published runs used.

ratio = eta * |w| / (|g| + weight_decay * |w| + eps), 1 where a norm is zero;  d = g + weight_decay * w
unscaled: m = momentum * m + rate * ratio * d;  w -= m, or with Nesterov w -= momentum * m + rate * ratio * d.
Which runs used which variant stands in `podscale.pytorch.optim.lars`.
"""

from typing import Literal

import jax.numpy as jnp
from jax import Array

from podscale.jax.flat_buffers import Buckets
from podscale.jax.optim.base import HyperParams, OptState, ParamShard, UpdateResult
from podscale.jax.optim.sgd import MomentumForm, add_weight_decay, momentum_factors, momentum_update

TrustForm = Literal["sum_of_norms", "norm_of_sum"]


def lars(
    shard: ParamShard,
    weights: Buckets,
    gradients: Buckets,
    opt_state: OptState,
    hyper: HyperParams,
    finite: Array,
    *,
    nesterov: bool,
    trust_coefficient: float,
    eps: float = 0.0,
    trust: TrustForm = "sum_of_norms",
    form: MomentumForm = "unscaled",
    clip: bool = False,
) -> UpdateResult:
    """See the module's text. Norms are those of whole fp32 arrays, after averaging over the devices.

    Arrays that do not adapt get ratio 1, which leaves plain momentum. clip: LARC's, the ratio becomes
    min(ratio / rate, 1), so that no layer moves faster than the learning rate.
    """
    directions = add_weight_decay(shard, weights, gradients, hyper.weight_decay)
    finite, (w, g) = shard.norms(finite, weights, directions if trust == "norm_of_sum" else gradients)
    below = g + eps
    if trust == "sum_of_norms":
        below += hyper.weight_decay * shard.uses_weight_decay * w
    ratio = jnp.where((w > 0) & (g > 0), trust_coefficient * w / below, 1.0)
    if clip:
        ratio = jnp.minimum(ratio / hyper.learning_rate, 1.0)
    both = momentum_factors(form, hyper.learning_rate, jnp.where(shard.uses_trust_ratio, ratio, 1.0))
    return momentum_update(
        shard, weights, directions, opt_state.moments["momentum"], both, hyper, finite, nesterov=nesterov
    )
