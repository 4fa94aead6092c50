"""Optimizers with second moments: Adam and AdamW, LAMB, RMSProp.

Adam (Kingma 2015, algorithm 1): weight decay as part of the gradient, as in torch, or decoupled (AdamW; Loshchilov
2019).

LAMB (You 2020) in NVIDIA's form, which clips the whole gradient first and corrects the moments:
g = g / max(1, |g over all parameters| / clip_norm);  u = d + weight_decay * w;  w -= rate * |w| / |u| * u
with d Adam's direction for g. |w| / |u| is 1 if a norm is zero and for arrays without trust ratio.

RMSProp (Hinton 2012, lecture 6e) with momentum, as in Inception's training (Szegedy 2016):
d = g + weight_decay * w;  v = decay * v + (1 - decay) * d^2;  u = d / (sqrt(v) + eps), then momentum (see `sgd`).

| as in      | v starts at | eps         | form     |
|------------|-------------|-------------|----------|
| torch      | 0           | beside root | scaled   |
| TensorFlow | 1           | in the root | unscaled |
"""

import math
from typing import Literal

import jax.numpy as jnp
from jax import Array

from podscale.jax.flat_buffers import Buckets
from podscale.jax.optim.base import HyperParams, OptState, ParamShard, UpdateResult
from podscale.jax.optim.sgd import MomentumForm, add_weight_decay, apply_direction, momentum_factors, momentum_update


def adam_directions(
    gradients: Buckets, opt_state: OptState, beta1: Array, finite: Array, *, beta2: float, eps: float
) -> tuple[Buckets, OptState]:
    """The directions, and what is kept of them; where not finite, that stays as it is, to the bit.

    m = b1 * m + (1 - b1) * g;  v = b2 * v + (1 - b2) * g^2;  m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)
    with t the updates carried out so far, this one included.
    """
    updates = opt_state.scalars["updates"] + finite
    first, second = bias_corrections(updates, beta1, beta2)
    directions, means, variances = [], [], []
    for g, m, v in zip(gradients, opt_state.moments["momentum"], opt_state.moments["variance"], strict=True):
        mean = beta1 * m + (1.0 - beta1) * g
        variance = beta2 * v + (1.0 - beta2) * jnp.square(g)
        directions.append(divide_or_zero(first * mean, second * jnp.sqrt(variance) + eps))
        means.append(jnp.where(finite, mean, m))
        variances.append(jnp.where(finite, variance, v))
    moments = {"momentum": tuple(means), "variance": tuple(variances)}
    return tuple(directions), OptState(moments, {"updates": updates})


def bias_corrections(updates: Array, beta1: Array, beta2: float) -> tuple[Array, Array]:
    """The factors that correct m and the root of v.

    By expm1: in fp32, 1 - 0.999 has four digits left.
    """
    count = jnp.maximum(updates, 1.0)
    log2 = math.log(beta2) if beta2 else -math.inf
    return -1.0 / jnp.expm1(count * jnp.log(beta1)), jnp.sqrt(-1.0 / jnp.expm1(count * log2))


def divide_or_zero(above: Array, below: Array) -> Array:
    """above / below, and 0 where below is: without an epsilon, in the zeros that fill rows up, which norms count."""
    return jnp.where(below == 0, 0.0, above / below)


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
    """Adam: w -= rate * u with Adam's direction u for g + weight_decay * w.

    decoupled: u of g alone, and w -= rate * weight_decay * w.
    """
    finite, _ = shard.sum_over_devices(finite)
    if not decoupled:
        gradients = add_weight_decay(shard, weights, gradients, hyper.weight_decay)
    directions, opt_state = adam_directions(gradients, opt_state, hyper.momentum, finite, beta2=beta2, eps=eps)
    if decoupled:
        directions = add_weight_decay(shard, weights, directions, hyper.weight_decay)
    return UpdateResult(apply_direction(shard, weights, directions, hyper.learning_rate, finite), opt_state, finite)


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
