"""SGD with momentum and Nesterov's form (Sutskever 2013, section 2); the momentum update shared with other rules."""

from typing import Literal

import jax.numpy as jnp
from jax import Array

from podscale.jax.flat_buffers import Buckets
from podscale.jax.optim.base import HyperParams, OptState, ParamShard, UpdateResult, as_rows

MomentumForm = Literal["unscaled", "scaled", "ratio_inside"]
"""Where the learning rate and LARS's trust ratio stand (Kumar 2019, table 1; You 2017, algorithm 1).

unscaled: both inside the momentum buffer, so that a change of them acts on new gradients alone. scaled: both outside,
so that it rescales what old gradients left. ratio_inside: the ratio inside, the learning rate outside.
"""


def add_weight_decay(shard: ParamShard, weights: Buckets, gradients: Buckets, weight_decay: Array) -> Buckets:
    """g + weight_decay * w for what decays."""
    decays = shard.per_row(weight_decay * shard.uses_weight_decay)
    return tuple(
        (as_rows(g) + decay * as_rows(w)).reshape(-1) for w, g, decay in zip(weights, gradients, decays, strict=True)
    )


def apply_direction(shard: ParamShard, weights: Buckets, directions: Buckets, rate: Array, finite: Array) -> Buckets:
    """w - rate * d where finite, else w. rate: for all, or one for each array."""
    return tuple(
        jnp.where(finite, as_rows(w) - away * as_rows(d), as_rows(w)).reshape(-1)
        for w, d, away in zip(weights, directions, shard.per_row(rate), strict=True)
    )


def momentum_update(
    shard: ParamShard,
    weights: Buckets,
    gradients: Buckets,
    momenta: Buckets,
    factors: tuple[Array, Array],
    hyper: HyperParams,
    finite: Array,
    *,
    nesterov: bool,
) -> UpdateResult:
    """u = inside * g;  m = momentum * m + u;  w -= outside * (u + momentum * m if nesterov else m).

    gradients: with weight decay. factors: inside and outside, each for all or one for each array (see `MomentumForm`).
    """
    after, kept = [], []
    buckets = zip(weights, gradients, momenta, *map(shard.per_row, factors), strict=True)
    for weight, gradient, moment, inside, outside in buckets:
        w, m, u = as_rows(weight), as_rows(moment), inside * as_rows(gradient)
        new = hyper.momentum * m + u
        step = u + hyper.momentum * new if nesterov else new
        after.append(jnp.where(finite, w - outside * step, w).reshape(-1))
        kept.append(jnp.where(finite, new, m).reshape(-1))
    return UpdateResult(tuple(after), OptState({"momentum": tuple(kept)}, {}), finite)


def momentum_factors(form: MomentumForm, rate: Array, ratio: Array) -> tuple[Array, Array]:
    """What stands inside and outside the momentum buffer."""
    match form:
        case "unscaled":
            return rate * ratio, jnp.ones_like(rate)
        case "scaled":
            return jnp.ones_like(rate), rate * ratio
        case "ratio_inside":
            return ratio, rate


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
    """SGD: d = g + weight_decay * w, then momentum, scaled by default as in torch and in Goyal 2017.

    Scaled: m = momentum * m + d;  w -= rate * (d + momentum * m if nesterov else m). Unscaled, the rate stands inside
    the buffer, and a schedule of the momentum can correct for its changes (Goyal 2017, section 3; Codreanu 2017).
    """
    finite, _ = shard.sum_over_devices(finite)
    both = momentum_factors(form, hyper.learning_rate, jnp.ones_like(hyper.learning_rate))
    directions = add_weight_decay(shard, weights, gradients, hyper.weight_decay)
    return momentum_update(
        shard, weights, directions, opt_state.moments["momentum"], both, hyper, finite, nesterov=nesterov
    )
