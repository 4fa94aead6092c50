"""SGD with momentum and Nesterov's form (Sutskever 2013, section 2); the momentum update that LARS and others share."""

from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
from jax import Array

from podscale.jax.flat_buffers import Buckets
from podscale.jax.optim.base import HyperParams, Optimizer, OptimizerResult, OptState, ParamShard, as_rows

MomentumForm = Literal["unscaled", "scaled", "ratio_inside"]
"""Position of the learning rate and LARS's trust ratio (Kumar 2019, table 1; You 2017, algorithm 1).

unscaled: both inside the momentum buffer, so that a change of them affects new gradients only. scaled: both outside, so
that a change rescales the whole buffer. ratio_inside: the ratio inside, the learning rate outside.
"""


def add_weight_decay(shard: ParamShard, weights: Buckets, gradients: Buckets, weight_decay: Array) -> Buckets:
    """Return g + `weight_decay` (scalar) * w for arrays that decay, and g for others."""
    decays = shard.per_row(weight_decay * shard.uses_weight_decay)
    return tuple(
        (as_rows(g) + decay * as_rows(w)).reshape(-1) for w, g, decay in zip(weights, gradients, decays, strict=True)
    )


def apply_direction(shard: ParamShard, weights: Buckets, directions: Buckets, rate: Array, finite: Array) -> Buckets:
    """Return w - rate * d if `finite` (bool scalar), else w. `rate` is a scalar or [arrays]."""
    return tuple(
        jnp.where(finite, as_rows(w) - row_rates * as_rows(d), as_rows(w)).reshape(-1)
        for w, d, row_rates in zip(weights, directions, shard.per_row(rate), strict=True)
    )


@dataclass(frozen=True)
class MomentumUpdate:
    """Momentum update.

    u = inside * d;  m = momentum * m + u;  w -= outside * (u + momentum * m if nesterov else m).

    `inside` and `outside` are one factor, or one for each array (see `MomentumForm`).
    """

    form: MomentumForm
    nesterov: bool = False

    def step(
        self,
        shard: ParamShard,
        weights: Buckets,
        directions: Buckets,
        opt_state: OptState,
        hyper: HyperParams,
        finite: Array,
        ratio: Array | float = 1.0,
    ) -> OptimizerResult:
        """Step along `directions`, which include weight decay. Other moments of the state stay as they are.

        Args:
            finite: bool scalar; if False, nothing changes.
            ratio: trust ratio, a scalar or [arrays].
        """
        factors = momentum_factors(self.form, hyper.learning_rate, ratio * jnp.ones_like(hyper.learning_rate))
        new_weights, new_momenta = [], []
        buckets = zip(weights, directions, opt_state.moments["momentum"], *map(shard.per_row, factors), strict=True)
        for weight, direction, momentum, inside, outside in buckets:
            w, m, u = as_rows(weight), as_rows(momentum), inside * as_rows(direction)
            new = hyper.momentum * m + u
            step = u + hyper.momentum * new if self.nesterov else new
            new_weights.append(jnp.where(finite, w - outside * step, w).reshape(-1))
            new_momenta.append(jnp.where(finite, new, m).reshape(-1))
        opt_state = opt_state._replace(moments={**opt_state.moments, "momentum": tuple(new_momenta)})
        return OptimizerResult(tuple(new_weights), opt_state, finite)


def momentum_factors(form: MomentumForm, rate: Array, ratio: Array) -> tuple[Array, Array]:
    """Return the factors inside and outside of the momentum buffer; `rate` is a scalar, `ratio` too or [arrays]."""
    match form:
        case "unscaled":
            return rate * ratio, jnp.ones_like(rate)
        case "scaled":
            return jnp.ones_like(rate), rate * ratio
        case "ratio_inside":
            return ratio, rate


@dataclass(frozen=True)
class Sgd(Optimizer):
    """SGD: d = g + weight_decay * w, then momentum (see `MomentumUpdate`), scaled by default as in Goyal 2017.

    Scaled: m = momentum * m + d;  w -= rate * (d + momentum * m if nesterov else m). In the unscaled form the rate is
    inside the buffer, and a momentum schedule can correct for its changes (Goyal 2017, section 3; Codreanu 2017).
    """

    nesterov: bool
    form: MomentumForm = "scaled"

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
        directions = add_weight_decay(shard, weights, gradients, hyper.weight_decay)
        momentum = MomentumUpdate(self.form, self.nesterov)
        return momentum.step(shard, weights, directions, opt_state, hyper, finite)
