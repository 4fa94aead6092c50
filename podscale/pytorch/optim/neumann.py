"""Neumann optimizer (Krishnan 2018, algorithm 2): each gradient adds a term of the series for the inverse Hessian.

The stored weights w are the result + mu m, where the next gradient is taken. With eta the learning rate, mu = 1 - 1 /
(1 + t) between two bounds, N the number of variables, and norms over all of them:

    1       v = w, m = 0
    2       plain SGD for a while:  w = w - eta grad(w)
    3..5    for t = 1, 2, ...:  g = gradient of a new batch at w
    6, 7        every K steps, K doubled each time, and at t = 1:  m = -eta g
    8, 9        else:  d = g + (alpha |w - v|^2 - beta N / |w - v|^2) (w - v) / |w - v|
    10                 m = mu m - eta d
    11                 w = w + mu m - eta d
    12                 v = w + gamma (v - w)
    13      the result is  w - mu m

Weight decay, which the algorithm does not have, is part of the gradient. Options for what the paper leaves open:
whether a reset also runs lines 11 and 12, with d = g (`on_reset`; else nothing moves); whether line 11 has the new m or
the previous one (`moves_by`; the new one makes line 13 exact); and the unit of t in mu (`momentum_time`).
"""

import torch
from torch import Tensor

from podscale.config.optimizer import NeumannSection
from podscale.pytorch.optim.base import HyperParams, LookaheadOptimizer, Optimizer, copy_where_finite, dot_fp64
from podscale.pytorch.optim.param_shard import ParamShard
from podscale.pytorch.optim.sgd import add_weight_decay


class Neumann(Optimizer, LookaheadOptimizer):
    """Neumann optimizer (see the module)."""

    def __init__(self, shard: ParamShard, section: NeumannSection, steps_per_epoch: float) -> None:
        self._shard, self._section, self._steps_per_epoch = shard, section, steps_per_epoch
        self._sgd_steps = round(section.sgd_epochs * steps_per_epoch)
        self._push = section.beta * sum(each.size for each in shard.param_slices)
        period = max(1.0, float(round(section.reset_epochs * steps_per_epoch)))
        self._steps, self._mu, self._last_reset = (torch.zeros((), device=shard.device) for _ in range(3))
        self._reset_at, self._period = (torch.full((), value, device=shard.device) for value in (1.0, period))
        self.moments = {"momentum": shard.zeros(), "average": shard.zeros()}
        self.scalars = {
            "updates": self._steps,
            "mu": self._mu,
            "reset_at": self._reset_at,
            "last_reset": self._last_reset,
            "period": self._period,
        }
        self._momenta, self._averages = (shard.views(values) for values in self.moments.values())

    @torch.no_grad()
    def step(self, hyper: HyperParams, finite: Tensor) -> Tensor:
        section, eta = self._section, hyper.learning_rate
        finite, (square,) = self._shard.sum_over_ranks(finite, self._local_squared_distance())
        first = self._steps == 0
        t = self._steps - self._sgd_steps + 1.0
        sgd = t < 1.0
        reset = t == self._reset_at
        held = reset & (section.on_reset == "hold")
        mu = self._momentum(t)
        # If not finite, all factors change nothing, to the bit.
        moves, is_neumann = finite & ~held, finite & ~sgd
        distance = torch.where(is_neumann & ~first & ~reset, self._distance_factor(square[0]), 0.0)
        m_from_m = torch.where(is_neumann, torch.where(reset, 0.0, mu), 1.0)
        m_from_d = torch.where(is_neumann, -eta, 0.0)
        w_from_m = torch.where(is_neumann & moves, mu, 0.0)
        w_from_d = torch.where(moves, -eta, 0.0)
        v_from_new_w = torch.where(is_neumann & moves, 1.0 - section.gamma, 0.0)
        v_from_w = torch.where(finite & first, 1.0 - v_from_new_w, 0.0)
        v_from_v = torch.where(finite & first, 0.0, 1.0 - v_from_new_w)
        for group, m, v in zip(self._shard.groups, self._momenta, self._averages, strict=True):
            w, d, count = group.weights, group.gradients, len(group.weights)
            add_weight_decay(group, hyper.weight_decay)
            torch._foreach_addcmul_(d, torch._foreach_sub(w, v), [distance] * count)  # line 8
            torch._foreach_mul_(v, v_from_v)  # line 1, and line 12 without its last term
            torch._foreach_addcmul_(v, w, [v_from_w] * count)
            if section.moves_by == "previous":
                torch._foreach_addcmul_(w, m, [w_from_m] * count)
            torch._foreach_mul_(m, m_from_m)  # lines 7 and 10
            torch._foreach_addcmul_(m, d, [m_from_d] * count)
            if section.moves_by == "current":
                torch._foreach_addcmul_(w, m, [w_from_m] * count)
            torch._foreach_addcmul_(w, d, [w_from_d] * count)  # lines 2 and 11
            torch._foreach_addcmul_(v, w, [v_from_new_w] * count)
        self._advance(t, mu, reset & finite, finite)
        return finite

    @torch.no_grad()
    def evaluation_weights(self) -> Tensor:
        """Return the result of line 13 (see `LookaheadOptimizer`)."""
        result = self._shard.zeros()
        for group, momenta, parts in zip(self._shard.groups, self._momenta, self._shard.views(result), strict=True):
            for w, m, part in zip(group.weights, momenta, parts, strict=True):
                part.copy_(w - self._mu * m)
        return result

    def _local_squared_distance(self) -> Tensor:
        """Return this rank's part of |w - v|^2: fp64 [1]."""
        squares = [
            dot_fp64(difference, difference)
            for group, v in zip(self._shard.groups, self._averages, strict=True)
            for difference in torch._foreach_sub(group.weights, v)
        ]
        return self._shard.sum_local(squares)

    def _distance_factor(self, square: Tensor) -> Tensor:
        """Return the factor of w - v in line 8, from |w - v|^2; 0 if that is 0, so that there is no direction."""
        slope = self._section.alpha * square - self._push / square
        return torch.where(square > 0, slope / square.sqrt(), 0.0).to(self._shard.weights.dtype)

    def _momentum(self, t: Tensor) -> Tensor:
        section = self._section
        match section.momentum_time:
            case "updates":
                time = t
            case "since_reset":
                time = t - self._last_reset
            case "epochs":
                time = t / self._steps_per_epoch
        return (1.0 - 1.0 / (1.0 + time.clamp(min=0.0))).clamp(section.momentum_start, section.momentum_end)

    def _advance(self, t: Tensor, mu: Tensor, reset: Tensor, finite: Tensor) -> None:
        """Count the step and, after a reset, set the time of the next one."""
        self._steps += finite
        copy_where_finite(finite & (t >= 1.0), self._mu, mu)
        copy_where_finite(reset, self._last_reset, t)
        copy_where_finite(reset, self._reset_at, t + self._period)
        copy_where_finite(reset, self._period, 2.0 * self._period)
