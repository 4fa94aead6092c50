"""Optimizers with second moments: Adam and AdamW, LAMB, RMSProp.

Adam (Kingma 2015, algorithm 1): weight decay as part of the gradient, as in torch, or decoupled (AdamW; Loshchilov
2019).

LAMB (You 2020) in NVIDIA's form, which clips the global gradient first and corrects the moments:
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
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
from jax import Array

from podscale.jax.flat_buffers import Buckets
from podscale.jax.optim.base import HyperParams, Optimizer, OptimizerResult, OptState, ParamShard
from podscale.jax.optim.sgd import MomentumForm, MomentumUpdate, add_weight_decay, apply_direction

ADAM_MOMENTS = {"momentum": 0.0, "variance": 0.0}
"""Initial moments of Adam and LAMB."""
STEP_COUNT = {"updates": 0.0}
"""Their scalar state: the steps applied so far."""


@dataclass(frozen=True)
class AdamMoments:
    """Moments m and v of Adam and LAMB, and their direction.

    m = b1 * m + (1 - b1) * g;  v = b2 * v + (1 - b2) * g^2;  direction = m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)
    with t the steps applied so far, this one included.
    """

    beta2: float
    eps: float

    def directions(
        self, gradients: Buckets, opt_state: OptState, beta1: Array, finite: Array
    ) -> tuple[Buckets, OptState]:
        """Return the directions and the new state. If `finite` is False, the state stays unchanged, to the bit.

        `beta1` is an fp32 scalar, `finite` a bool scalar.
        """
        steps = opt_state.scalars["updates"] + finite
        first, second = bias_corrections(steps, beta1, self.beta2)
        directions, means, variances = [], [], []
        for g, m, v in zip(gradients, opt_state.moments["momentum"], opt_state.moments["variance"], strict=True):
            mean = beta1 * m + (1.0 - beta1) * g
            variance = self.beta2 * v + (1.0 - self.beta2) * jnp.square(g)
            directions.append(divide_or_zero(first * mean, second * jnp.sqrt(variance) + self.eps))
            means.append(jnp.where(finite, mean, m))
            variances.append(jnp.where(finite, variance, v))
        moments = {"momentum": tuple(means), "variance": tuple(variances)}
        return tuple(directions), opt_state._replace(moments=moments, scalars={"updates": steps})


def bias_corrections(steps: Array, beta1: Array, beta2: float) -> tuple[Array, Array]:
    """Return the factors that correct m and the root of v after `steps`; all are fp32 scalars, `beta1` too.

    Computed by expm1, because 1 - 0.999 has four correct digits in fp32.
    """
    count = jnp.maximum(steps, 1.0)
    log2 = math.log(beta2) if beta2 else -math.inf
    return -1.0 / jnp.expm1(count * jnp.log(beta1)), jnp.sqrt(-1.0 / jnp.expm1(count * log2))


def divide_or_zero(numerator: Array, denominator: Array) -> Array:
    """Return `numerator` / `denominator`, or 0 for a denominator of 0.

    Padding has it if eps is 0, and its NaN would reach the norms.
    """
    return jnp.where(denominator == 0, 0.0, numerator / denominator)


@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam: w -= rate * u with the direction u of `AdamMoments` for g + weight_decay * w.

    If `decoupled` (AdamW), u is for g alone, and w -= rate * weight_decay * w.
    """

    beta2: float = 0.999
    eps: float = 1e-8
    decoupled: bool = False
    initial_moments = ADAM_MOMENTS
    initial_scalars = STEP_COUNT

    def step(
        self,
        shard: ParamShard,
        weights: Buckets,
        gradients: Buckets,
        opt_state: OptState,
        hyper: HyperParams,
        finite: Array,
    ) -> OptimizerResult:
        finite, _ = shard.sum_over_devices(finite)
        if not self.decoupled:
            gradients = add_weight_decay(shard, weights, gradients, hyper.weight_decay)
        moments = AdamMoments(self.beta2, self.eps)
        directions, opt_state = moments.directions(gradients, opt_state, hyper.momentum, finite)
        if self.decoupled:
            directions = add_weight_decay(shard, weights, directions, hyper.weight_decay)
        weights = apply_direction(shard, weights, directions, hyper.learning_rate, finite)
        return OptimizerResult(weights, opt_state, finite)


@dataclass(frozen=True)
class Lamb(Optimizer):
    """LAMB (see the module). `clip_norm` 0 leaves the gradient as it is; with `clip` a ratio above 1 becomes 1."""

    beta2: float
    eps: float = 1e-6
    clip_norm: float = 1.0
    clip: bool = False
    initial_moments = ADAM_MOMENTS
    initial_scalars = STEP_COUNT

    def step(
        self,
        shard: ParamShard,
        weights: Buckets,
        gradients: Buckets,
        opt_state: OptState,
        hyper: HyperParams,
        finite: Array,
    ) -> OptimizerResult:
        finite, (g,) = shard.norms(finite, gradients)
        if self.clip_norm:
            shrink = 1.0 / jnp.maximum(jnp.linalg.norm(g) / self.clip_norm, 1.0)
            gradients = tuple(shrink * bucket for bucket in gradients)
        moments = AdamMoments(self.beta2, self.eps)
        directions, opt_state = moments.directions(gradients, opt_state, hyper.momentum, finite)
        directions = add_weight_decay(shard, weights, directions, hyper.weight_decay)
        _, (w, u) = shard.norms(finite, weights, directions)
        ratio = jnp.where((w > 0) & (u > 0), w / u, 1.0)
        if self.clip:
            ratio = jnp.minimum(ratio, 1.0)
        rate = hyper.learning_rate * jnp.where(shard.uses_trust_ratio, ratio, 1.0)
        return OptimizerResult(apply_direction(shard, weights, directions, rate, finite), opt_state, finite)


RmsPropVariant = Literal["torch", "tensorflow"]


@dataclass(frozen=True)
class RmsProp(Optimizer):
    """RMSProp (see the module)."""

    decay: float = 0.9
    eps: float = 1e-8
    variant: RmsPropVariant = "torch"
    form: MomentumForm = "scaled"

    @property
    def initial_moments(self) -> Mapping[str, float]:
        return {"momentum": 0.0, "variance": 1.0 if self.variant == "tensorflow" else 0.0}

    def step(
        self,
        shard: ParamShard,
        weights: Buckets,
        gradients: Buckets,
        opt_state: OptState,
        hyper: HyperParams,
        finite: Array,
    ) -> OptimizerResult:
        finite, _ = shard.sum_over_devices(finite)
        directions, variances = [], []
        decayed = add_weight_decay(shard, weights, gradients, hyper.weight_decay)
        for d, v in zip(decayed, opt_state.moments["variance"], strict=True):
            variance = self.decay * v + (1.0 - self.decay) * jnp.square(d)
            root = jnp.sqrt(variance) + self.eps if self.variant == "torch" else jnp.sqrt(variance + self.eps)
            directions.append(divide_or_zero(d, root))
            variances.append(jnp.where(finite, variance, v))
        opt_state = opt_state._replace(moments={**opt_state.moments, "variance": tuple(variances)})
        return MomentumUpdate(self.form).step(shard, weights, tuple(directions), opt_state, hyper, finite)
