"""Adam (Kingma 2015), a baseline: decay as part of the gradient, as in torch, or beside it (AdamW; Loshchilov 2019)."""

from jax import Array

from podscale.jax.gradients import Buckets
from podscale.jax.optim.base import HyperParams, OptState, UpdateResult
from podscale.jax.optim.moments import adam_directions
from podscale.jax.optim.momentum import add_weight_decay, apply_direction
from podscale.jax.optim.share import ParamShard


def adam(
    shard: ParamShard,
    weights: Buckets,
    gradients: Buckets,
    opt_state: OptState,
    hyper: HyperParams,
    finite: Array,
    *,
    beta2: float = 0.999,
    eps: float = 1e-8,
    decoupled: bool = False,
) -> UpdateResult:
    """w -= rate * u with the direction u of `moments.direct`, of g + weight_decay * w.

    decoupled: u of g alone, and w -= rate * weight_decay * w.
    """
    finite, _ = shard.sum_over_devices(finite)
    if not decoupled:
        gradients = add_weight_decay(shard, weights, gradients, hyper.weight_decay)
    directions, opt_state = adam_directions(gradients, opt_state, hyper.momentum, finite, beta2=beta2, eps=eps)
    if decoupled:
        directions = add_weight_decay(shard, weights, directions, hyper.weight_decay)
    return UpdateResult(apply_direction(shard, weights, directions, hyper.learning_rate, finite), opt_state, finite)
