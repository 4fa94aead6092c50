"""LAMB (You 2020) in NVIDIA's form: the whole gradient is clipped first, the moments are corrected.

g = g / max(1, |g over all parameters| / clip_norm);  u = d + weight_decay * w;  w -= rate * |w| / |u| * u
with d what `moments.direct` makes of g.
The ratio |w| / |u| is 1 where a norm is zero, and for arrays that do not adapt.
"""

import jax.numpy as jnp
from jax import Array

from podscale.jax.gradients import Buckets
from podscale.jax.optim.base import HyperParams, OptState, UpdateResult
from podscale.jax.optim.moments import adam_directions
from podscale.jax.optim.momentum import add_weight_decay, apply_direction
from podscale.jax.optim.share import ParamShard


def lamb(
    shard: ParamShard,
    weights: Buckets,
    gradients: Buckets,
    opt_state: OptState,
    hyper: HyperParams,
    finite: Array,
    *,
    beta2: float,
    eps: float = 1e-6,
    clip_norm: float = 1.0,
    clip: bool = False,
) -> UpdateResult:
    """See the module's text. clip_norm: 0 leaves gradients as they are. clip: a ratio above 1 becomes 1."""
    finite, (g,) = shard.norms(finite, gradients)
    if clip_norm:
        shrink = 1.0 / jnp.maximum(jnp.linalg.norm(g) / clip_norm, 1.0)
        gradients = tuple(shrink * bucket for bucket in gradients)
    directions, opt_state = adam_directions(gradients, opt_state, hyper.momentum, finite, beta2=beta2, eps=eps)
    directions = add_weight_decay(shard, weights, directions, hyper.weight_decay)
    _, (w, u) = shard.norms(finite, weights, directions)
    ratio = jnp.where((w > 0) & (u > 0), w / u, 1.0)
    if clip:
        ratio = jnp.minimum(ratio, 1.0)
    rate = hyper.learning_rate * jnp.where(shard.uses_trust_ratio, ratio, 1.0)
    return UpdateResult(apply_direction(shard, weights, directions, rate, finite), opt_state, finite)
