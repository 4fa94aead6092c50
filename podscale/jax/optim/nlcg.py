"""Preconditioned nonlinear conjugate gradient (Adya 2018); `podscale.pytorch.optim.nlcg` has the lines of its rule.

All arrays are one vector. In a sharded step the products of line 1, and <r, s_old>, are summed in one message, and rho,
which needs the new preconditioner, in a second one. LARS, which comes before them, adds a third.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from podscale.config.optimizer import NlcgSection
from podscale.jax.flat_buffers import Buckets
from podscale.jax.optim.base import (
    HyperParams,
    Optimizer,
    OptimizerResult,
    OptState,
    ParamShard,
    choose_finite,
    scale_arrays,
)
from podscale.jax.optim.sgd import add_weight_decay
from podscale.training import nlcg_rates
from podscale.training.nlcg_rates import EPS, LOSS_DECAY, RateMode


@dataclass(frozen=True)
class Nlcg(Optimizer):
    """Preconditioned nonlinear conjugate gradient (see the module)."""

    section: NlcgSection

    @property
    def initial_moments(self) -> Mapping[str, float]:
        moments = {"curvature": 1.0, "direction": 0.0, "gradient": 0.0}
        return moments | {"descent": 0.0} if self.section.beta == "polak_ribiere" else moments

    @property
    def initial_scalars(self) -> Mapping[str, float]:
        return {"updates": 0.0, "rho": 0.0, "moved": 0.0} | RATE_CONTROL_SCALARS

    def step(
        self,
        shard: ParamShard,
        weights: Buckets,
        gradients: Buckets,
        opt_state: OptState,
        hyper: HyperParams,
        finite: Array,
    ) -> OptimizerResult:
        old, scalars = opt_state.moments, opt_state.scalars
        steps, is_released = scalars["updates"], self.section.variant == "released"
        old_rate = hyper.learning_rate * scalars["base_rate"] if is_released else scalars["moved"]
        g = add_weight_decay(shard, weights, gradients, hyper.weight_decay)
        finite, g = self._scale_gradients(shard, weights, g, finite)
        h, finite, r_s_old = self._precondition(shard, g, opt_state, old_rate, finite)
        s = tuple(a / (b + EPS) for a, b in zip(g, h, strict=True))  # of the gradient: the direction is -s
        _, (rho,) = shard.sum_products(finite, (s, g))
        beta = jnp.clip((rho - r_s_old) / (scalars["rho"] + EPS), 0.0, 1.0)
        beta = jnp.where(_is_due(steps, self.section.restart_every), 0.0, beta)
        control = LossRateControl(self.section.step, self.section.tolerance, updates_first=is_released)
        base_rate, taken_back, control_scalars = control(hyper.loss, steps, scalars)
        t = hyper.learning_rate * base_rate
        move = _move_and_keep_direction if is_released else _move
        moved, d = move(weights, old["direction"], s, MoveFactors(beta, taken_back, t, old_rate))
        moments = {"curvature": h, "direction": d, "gradient": g}
        if "descent" in old:
            moments["descent"] = tuple(-a for a in s)
        moments = {name: choose_finite(finite, new, old[name]) for name, new in moments.items()}
        new_scalars = {"updates": steps + 1.0, "rho": rho, "moved": t} | control_scalars
        new_scalars = {name: jnp.where(finite, new, scalars[name]) for name, new in new_scalars.items()}
        state = opt_state._replace(moments=moments, scalars=new_scalars)
        return OptimizerResult(choose_finite(finite, moved, weights), state, finite)

    def _precondition(
        self, shard: ParamShard, g: Buckets, opt_state: OptState, old_rate: Array, finite: Array
    ) -> tuple[Buckets, Array, Array]:
        """Run line 1: return the new diagonal h, whether all devices are finite, and <r, s_old> (0 without s_old).

        With p = t_old d_old, a = -t_old^2 / (<p, h p> + eps), b = 1 / (<y, p> + eps) and c the sum of the terms with
        eps, h = |h + a (h d_old)^2 + b y^2 + c|. If h is not to change, a, b and c are 0.
        """
        old, scalars = opt_state.moments, opt_state.scalars
        steps = scalars["updates"]
        y = tuple(new - before for new, before in zip(g, old["gradient"], strict=True))
        hd = tuple(h * d for h, d in zip(old["curvature"], old["direction"], strict=True))
        pairs = [(y, old["direction"]), (hd, old["direction"])]
        if "descent" in old:
            pairs.append((g, old["descent"]))
        finite, (y_d, d_hd, *g_s_old) = shard.sum_products(finite, *pairs)
        y_p, p_hp = y_d * old_rate, d_hd * old_rate * old_rate
        changes = (y_p >= EPS) & (p_hp >= EPS)
        a = jnp.where(changes, -old_rate * old_rate / (p_hp + EPS), 0.0)
        b = jnp.where(changes, 1.0 / (y_p + EPS), 0.0)
        c = jnp.where(changes, EPS / (y_p + EPS) - EPS / (p_hp + EPS), 0.0)
        forgets = _is_due(steps, self.section.forget_every)

        def changed(h: Array, hd: Array, y: Array) -> Array:
            return jnp.where(forgets, 1.0, jnp.abs(h + a * hd * hd + b * y * y + c))

        h = tuple(map(changed, old["curvature"], hd, y))
        return h, finite, -g_s_old[0] if g_s_old else jnp.zeros_like(y_d)

    def _scale_gradients(self, shard: ParamShard, weights: Buckets, g: Buckets, finite: Array) -> tuple[Array, Buckets]:
        """Scale the gradients of batch norm, and those with trust ratio by  l |w| / (|g| + eps + 0.1 l |w|)  (LARS).

        Arrays of zeros are not scaled, unlike in the authors' program: they would never move.
        """
        lars, norm_scale = self.section.lars_coefficient, self.section.norm_gradient_scale
        if lars == 0 and norm_scale == 1.0:
            return finite, g
        scale = jnp.where(shard.is_batch_norm, norm_scale, 1.0)
        if lars:
            finite, (w_norm, g_norm) = shard.norms(finite, weights, g)
            ratio = lars * w_norm / (g_norm * scale + EPS + 0.1 * lars * w_norm)
            scale = scale * jnp.where(shard.uses_trust_ratio & (w_norm > 0), ratio, 1.0)
        return finite, scale_arrays(shard, g, scale)


class MoveFactors(NamedTuple):
    """Scalars of lines 2 to 4: `rate` is t, and `old_rate` t_old."""

    beta: Array
    taken_back: Array
    rate: Array
    old_rate: Array


def _move(weights: Buckets, old: Buckets, s: Buckets, factors: MoveFactors) -> tuple[Buckets, Buckets]:
    """Run lines 2 to 4: return weights and direction. `old` is the last direction, -s the steepest descent."""
    beta, taken_back, t, old_rate = factors
    d_factor = (1.0 - taken_back) * beta - jnp.where(t > 0, taken_back * old_rate / t, 0.0)
    d = tuple(d_factor * a + (taken_back - 1.0) * b for a, b in zip(old, s, strict=True))
    return tuple(w + t * a for w, a in zip(weights, d, strict=True)), d


def _move_and_keep_direction(
    weights: Buckets, old: Buckets, s: Buckets, factors: MoveFactors
) -> tuple[Buckets, Buckets]:
    """Run lines 2 to 4 of the variant `released`, whose direction is that of line 2. Arguments as in `_move`."""
    beta, taken_back, t, old_rate = factors
    taken_back = jnp.where(t > EPS, taken_back, 0.0)
    d = tuple(beta * a - b for a, b in zip(old, s, strict=True))
    moves = zip(weights, old, d, strict=True)
    return tuple(w - taken_back * old_rate * a + (1.0 - taken_back) * t * b for w, a, b in moves), d


def _is_due(steps: Array, every: int) -> Array:
    """Return True at step 0 and, unless `every` is 0, at its multiples. `steps` is an fp32 scalar."""
    return jnp.remainder(steps, every) == 0 if every else steps == 0


RATE_CONTROL_SCALARS = {"base_rate": nlcg_rates.MAX_BASE_RATE, "loss_average": 0.0, "loss_before": 0.0}
"""Initial state of `LossRateControl`."""


@dataclass(frozen=True)
class LossRateControl:
    """Line 3 of the rule: base rate and fraction of the last direction to take back, from the loss.

    If `updates_first`, mode `online` compares with the average that includes the loss of the step.
    """

    mode: RateMode
    tolerance: float
    updates_first: bool = False

    def __call__(
        self, loss: Array, steps: Array, scalars: Mapping[str, Array]
    ) -> tuple[Array, Array, dict[str, Array]]:
        """Return base rate, fraction and new scalars. `loss` and `steps`, the steps so far, are fp32 scalars."""
        base, before, average = (scalars[name] for name in ("base_rate", "loss_before", "loss_average"))
        if self.mode == "none":
            return base, jnp.zeros_like(base), {name: scalars[name] for name in RATE_CONTROL_SCALARS}
        is_first = steps == 0
        new_average = jnp.where(is_first, loss, LOSS_DECAY * average + (1.0 - LOSS_DECAY) * loss)
        if self.mode == "step":
            is_compared, rise = jnp.remainder(steps, nlcg_rates.COMPARE_EVERY_STEPS) == 0, new_average / before
        else:
            is_compared, rise = jnp.array(True), loss / (new_average if self.updates_first else average)
        is_compared &= ~is_first
        limits, factors, fractions = map(jnp.array, nlcg_rates.rate_table(self.mode, self.tolerance))
        row = (rise > limits).sum()
        factor, fraction = factors[row], fractions[row]
        base = jnp.where(is_compared, jnp.clip(base * factor, nlcg_rates.MIN_BASE_RATE, nlcg_rates.MAX_BASE_RATE), base)
        before = jnp.where(is_compared | is_first, new_average, before)
        state = {"base_rate": base, "loss_average": new_average, "loss_before": before}
        return base, jnp.where(is_compared, fraction, 0.0), state
