"""The Neumann optimizer (Krishnan 2018, algorithm 2): a few terms of Neumann's series for the inverse Hessian, one
gradient at a time.

The stored weights w stand ahead of the point reached, at that point + mu m, where the next gradient is taken. With eta
the learning rate, mu = 1 - 1 / (1 + t) between two bounds, N the number of variables, and norms over all of them:

    1       v = w, m = 0
    2       plain SGD for a while:  w = w - eta grad(w)
    3..5    for t = 1, 2, ...:  g = gradient of a new batch at w
    6, 7        every K updates, K doubled each time, and at t = 1:  m = -eta g
    8, 9        else:  d = g + (alpha |w - v|^2 - beta N / |w - v|^2) (w - v) / |w - v|
    10                 m = mu m - eta d
    11                 w = w + mu m - eta d
    12                 v = w + gamma (v - w)
    13      the result is  w - mu m

Weight decay, which the algorithm does not name, is part of the gradient. Not clear in print, and therefore options:
whether lines 11 and 12 hold for a reset too, with d = g (`on_reset`; else it moves nothing); whether line 11 has the
new m or the one before (`moves_by`; the new one makes line 13 exact); and what t counts in mu (`momentum_time`).
"""

import torch
from torch import Tensor

from podscale.config.optimizer import NeumannSection
from podscale.pytorch.optim.base import HyperParams, copy_where_finite, dot_fp64
from podscale.pytorch.optim.param_shard import ParamShard
from podscale.pytorch.optim.sgd import add_weight_decay


class Neumann:
    """See the module's text. steps_per_epoch: updates of an epoch, which lengths in epochs are counted in."""

    def __init__(self, shard: ParamShard, section: NeumannSection, steps_per_epoch: float) -> None:
        self._shard, self._section, self._steps_per_epoch = shard, section, steps_per_epoch
        self._sgd_updates = round(section.sgd_epochs * steps_per_epoch)
        self._push = section.beta * sum(segment.size for segment in shard.param_slices)
        self._updates, self._mu = torch.zeros((), device=shard.device), torch.zeros((), device=shard.device)
        self._reset_at = torch.ones((), device=shard.device)
        self._last_reset = torch.zeros((), device=shard.device)
        self._period = torch.full(
            (), max(1.0, float(round(section.reset_epochs * steps_per_epoch))), device=shard.device
        )
        self.moments = {"momentum": shard.zeros(), "average": shard.zeros()}
        self.scalars = {
            "updates": self._updates,
            "mu": self._mu,
            "reset_at": self._reset_at,
            "last_reset": self._last_reset,
            "period": self._period,
        }
        self._momenta, self._averages = (shard.views(kept) for kept in self.moments.values())

    @torch.no_grad()
    def step(self, hyper: HyperParams, finite: Tensor) -> Tensor:
        section, eta = self._section, hyper.learning_rate
        finite, (square,) = self._shard.sum_over_ranks(finite, self._local_squared_distance())
        first = self._updates == 0
        t = self._updates - self._sgd_updates + 1.0
        sgd = t < 1.0
        reset = t == self._reset_at
        held = reset & (section.on_reset == "hold")
        mu = self._momentum(t)
        moves, pushes = finite & ~held, finite & ~sgd  # factors that change nothing, to the bit, where not finite
        slope = torch.where(pushes & ~first & ~reset, self._distance_factor(square[0]), 0.0)
        keep = torch.where(pushes, torch.where(reset, 0.0, mu), 1.0)
        push = torch.where(pushes, -eta, 0.0)
        ahead = torch.where(pushes & moves, mu, 0.0)
        down = torch.where(moves, -eta, 0.0)
        follow = torch.where(pushes & moves, 1.0 - section.gamma, 0.0)
        begin = torch.where(finite & first, 1.0 - follow, 0.0)
        stay = torch.where(finite & first, 0.0, 1.0 - follow)
        for group, m, v in zip(self._shard.groups, self._momenta, self._averages, strict=True):
            w, d, each = group.weights, group.gradients, len(group.weights)
            add_weight_decay(group, hyper.weight_decay)
            torch._foreach_addcmul_(d, torch._foreach_sub(w, v), [slope] * each)  # line 8
            torch._foreach_mul_(v, stay)  # line 12 but for its last term, and line 1
            torch._foreach_addcmul_(v, w, [begin] * each)
            if section.moves_by == "previous":
                torch._foreach_addcmul_(w, m, [ahead] * each)
            torch._foreach_mul_(m, keep)  # lines 7 and 10
            torch._foreach_addcmul_(m, d, [push] * each)
            if section.moves_by == "current":
                torch._foreach_addcmul_(w, m, [ahead] * each)
            torch._foreach_addcmul_(w, d, [down] * each)  # lines 2 and 11
            torch._foreach_addcmul_(v, w, [follow] * each)
        self._advance(t, mu, reset & finite, finite)
        return finite

    @torch.no_grad()
    def evaluation_weights(self) -> Tensor:
        """Return the result of line 13 (see `LookaheadOptimizer`)."""
        found = self._shard.zeros()
        for group, momenta, parts in zip(self._shard.groups, self._momenta, self._shard.views(found), strict=True):
            for w, m, part in zip(group.weights, momenta, parts, strict=True):
                part.copy_(w - self._mu * m)
        return found

    def _local_squared_distance(self) -> Tensor:
        """This rank's part of |w - v|^2: fp64, one value."""
        squares = [
            dot_fp64(away, away)
            for group, v in zip(self._shard.groups, self._averages, strict=True)
            for away in torch._foreach_sub(group.weights, v)
        ]
        return self._shard.sum_local(squares)

    def _distance_factor(self, square: Tensor) -> Tensor:
        """What multiplies w - v in line 8, from |w - v|^2; 0 where that is 0 and there is no direction."""
        rise = self._section.alpha * square - self._push / square
        return torch.where(square > 0, rise / square.sqrt(), 0.0).float()

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
        """Moves on to the next update, and after a reset to the next reset."""
        self._updates += finite
        copy_where_finite(finite & (t >= 1.0), self._mu, mu)
        copy_where_finite(reset, self._last_reset, t)
        copy_where_finite(reset, self._reset_at, t + self._period)
        copy_where_finite(reset, self._period, 2.0 * self._period)
