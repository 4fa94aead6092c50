"""RMSProp (Hinton 2012, lecture 6e) with momentum, a baseline: that of Inception's training (Szegedy 2016).

d = g + weight_decay * w;  v = decay * v + (1 - decay) * d^2;  u = d / (sqrt(v) + eps), then momentum (see `move`).

| as in      | v starts at | eps         | form     |
|------------|-------------|-------------|----------|
| torch      | 0           | beside root | scaled   |
| TensorFlow | 1           | in the root | unscaled |
"""

from typing import Literal

import jax.numpy as jnp
from jax import Array

from podscale.jax.gradients import Buckets
from podscale.jax.optim.base import HyperParams, OptState, UpdateResult
from podscale.jax.optim.moments import divide_or_zero
from podscale.jax.optim.momentum import MomentumForm, add_weight_decay, momentum_factors, momentum_update
from podscale.jax.optim.share import ParamShard

RmsPropVariant = Literal["torch", "tensorflow"]


def rmsprop(
    shard: ParamShard,
    weights: Buckets,
    gradients: Buckets,
    opt_state: OptState,
    hyper: HyperParams,
    finite: Array,
    *,
    decay: float = 0.9,
    eps: float = 1e-8,
    variant: RmsPropVariant = "torch",
    form: MomentumForm = "scaled",
) -> UpdateResult:
    """See the module's text; the form is free. Where v starts is for whoever makes the state: see `build.slots`."""
    finite, _ = shard.sum_over_devices(finite)
    directions, variances = [], []
    of_sum = add_weight_decay(shard, weights, gradients, hyper.weight_decay)
    for d, v in zip(of_sum, opt_state.moments["variance"], strict=True):
        variance = decay * v + (1.0 - decay) * jnp.square(d)
        root = jnp.sqrt(variance) + eps if variant == "torch" else jnp.sqrt(variance + eps)
        directions.append(divide_or_zero(d, root))
        variances.append(jnp.where(finite, variance, v))
    both = momentum_factors(form, hyper.learning_rate, jnp.ones_like(hyper.learning_rate))
    momenta = opt_state.moments["momentum"]
    found = momentum_update(shard, weights, tuple(directions), momenta, both, hyper, finite, nesterov=False)
    return found._replace(opt_state=OptState({**found.opt_state.moments, "variance": tuple(variances)}, {}))
