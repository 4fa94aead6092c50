"""The two moments of Adam, corrected for having begun at 0 (Kingma 2015, algorithm 1); LAMB begins with them too."""

import math

import jax.numpy as jnp
from jax import Array

from podscale.jax.gradients import Buckets
from podscale.jax.optim.base import OptState


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
