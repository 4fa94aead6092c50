"""Stochastic gradient descent with momentum, Nesterov's form on request (Sutskever 2013, section 2)."""

import jax.numpy as jnp
from jax import Array

from podscale.jax.gradients import Buckets
from podscale.jax.optim.base import HyperParams, OptState, UpdateResult
from podscale.jax.optim.momentum import MomentumForm, add_weight_decay, momentum_factors, momentum_update
from podscale.jax.optim.share import ParamShard


def sgd(
    shard: ParamShard,
    weights: Buckets,
    gradients: Buckets,
    opt_state: OptState,
    hyper: HyperParams,
    finite: Array,
    *,
    nesterov: bool,
    form: MomentumForm = "scaled",
) -> UpdateResult:
    """d = g + weight_decay * w, then momentum (see `move`), scaled by default as in torch and in Goyal 2017.

    Scaled: m = momentum * m + d;  w -= rate * (d + momentum * m if nesterov else m). Unscaled, the rate stands inside
    the buffer, and a schedule of the momentum can correct for its changes (Goyal 2017, section 3; Codreanu 2017).
    """
    finite, _ = shard.sum_over_devices(finite)
    both = momentum_factors(form, hyper.learning_rate, jnp.ones_like(hyper.learning_rate))
    directions = add_weight_decay(shard, weights, gradients, hyper.weight_decay)
    return momentum_update(
        shard, weights, directions, opt_state.moments["momentum"], both, hyper, finite, nesterov=nesterov
    )
