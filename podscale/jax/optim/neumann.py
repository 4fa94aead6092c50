"""Neumann optimizer (Krishnan 2018); `podscale.pytorch.optim.neumann` has the numbered lines of the algorithm.

The stored weights w are the result + mu m, the point of the next gradient. In a sharded step |w - v|^2 is summed in one
message.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import jax.numpy as jnp
from jax import Array

from podscale.config.optimizer import NeumannSection
from podscale.jax.flat_buffers import Buckets
from podscale.jax.optim.base import (
    HyperParams,
    LookaheadOptimizer,
    Optimizer,
    OptimizerResult,
    OptState,
    ParamShard,
    choose_finite,
)
from podscale.jax.optim.sgd import add_weight_decay

NEUMANN_MOMENTS = {"momentum": 0.0, "average": 0.0}


@dataclass(frozen=True)
class Neumann(Optimizer, LookaheadOptimizer):
    """Neumann optimizer (see the module)."""

    section: NeumannSection
    steps_per_epoch: float

    initial_moments = NEUMANN_MOMENTS

    @cached_property
    def initial_scalars(self) -> Mapping[str, float]:
        period = max(1.0, float(round(self.section.reset_epochs * self.steps_per_epoch)))
        return {"updates": 0.0, "mu": 0.0, "reset_at": 1.0, "last_reset": 0.0, "period": period}

    def step(
        self,
        shard: ParamShard,
        weights: Buckets,
        gradients: Buckets,
        opt_state: OptState,
        hyper: HyperParams,
        finite: Array,
    ) -> OptimizerResult:
        section, eta, scalars = self.section, hyper.learning_rate, opt_state.scalars
        momenta, averages = opt_state.moments["momentum"], opt_state.moments["average"]
        first = scalars["updates"] == 0
        t = scalars["updates"] - round(section.sgd_epochs * self.steps_per_epoch) + 1.0
        sgd, reset = t < 1.0, t == scalars["reset_at"]
        mu = self._momentum(t, scalars["last_reset"])
        held = reset & (section.on_reset == "hold")
        away = tuple(w - v for w, v in zip(weights, averages, strict=True))
        finite, (square,) = shard.sum_products(finite, (away, away))
        factor = jnp.where(sgd | first | reset, 0.0, self._distance_factor(shard, square))
        decayed = add_weight_decay(shard, weights, gradients, hyper.weight_decay)
        new_weights, new_momenta, new_averages = [], [], []
        for w, g, m, v, apart in zip(weights, decayed, momenta, averages, away, strict=True):
            d = g + factor * apart  # line 8
            moved = jnp.where(sgd, m, jnp.where(reset, 0.0, mu) * m - eta * d)  # lines 7 and 10
            along = moved if section.moves_by == "current" else m
            new = jnp.where(held, w, w + jnp.where(sgd, 0.0, mu) * along - eta * d)  # lines 2 and 11
            begun = jnp.where(first, w, v)  # line 1
            average = section.gamma * begun + (1.0 - section.gamma) * new  # line 12
            new_weights.append(new)
            new_momenta.append(moved)
            new_averages.append(jnp.where(sgd | held, begun, average))
        moments = {
            "momentum": choose_finite(finite, tuple(new_momenta), momenta),
            "average": choose_finite(finite, tuple(new_averages), averages),
        }
        state = opt_state._replace(moments=moments, scalars=_advance(scalars, t, mu, reset, finite))
        return OptimizerResult(choose_finite(finite, tuple(new_weights), weights), state, finite)

    def evaluation_weights(self, weights: Buckets, opt_state: OptState) -> Buckets:
        """Return the result of line 13 (see `LookaheadOptimizer`)."""
        mu, momenta = opt_state.scalars["mu"], opt_state.moments["momentum"]
        return tuple(w - mu * m for w, m in zip(weights, momenta, strict=True))

    def _distance_factor(self, shard: ParamShard, square: Array) -> Array:
        """Return the factor of w - v in line 8, from |w - v|^2; 0 if that is 0, so that there is no direction."""
        slope = self.section.alpha * square - self.section.beta * shard.num_parameters / square
        return jnp.where(square > 0, slope / jnp.sqrt(square), 0.0)

    def _momentum(self, t: Array, last_reset: Array) -> Array:
        section = self.section
        match section.momentum_time:
            case "updates":
                time = t
            case "since_reset":
                time = t - last_reset
            case "epochs":
                time = t / self.steps_per_epoch
        return jnp.clip(1.0 - 1.0 / (1.0 + jnp.maximum(time, 0.0)), section.momentum_start, section.momentum_end)


def _advance(scalars: Mapping[str, Array], t: Array, mu: Array, reset: Array, finite: Array) -> dict[str, Array]:
    """Count the step and, after a reset, set the time of the next one."""
    reset, period = reset & finite, scalars["period"]
    return {
        "updates": scalars["updates"] + finite,
        "mu": jnp.where(finite & (t >= 1.0), mu, scalars["mu"]),
        "reset_at": jnp.where(reset, t + period, scalars["reset_at"]),
        "last_reset": jnp.where(reset, t, scalars["last_reset"]),
        "period": jnp.where(reset, 2.0 * period, period),
    }
