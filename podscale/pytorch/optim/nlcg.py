"""Preconditioned nonlinear conjugate gradient (Adya 2018), after the authors' program (apple/ml-ncg 563b5e5).

All parameters are one vector w, g is the gradient of the loss and of the L2 decay, t = learning rate * base rate:

1. Preconditioner, the diagonal h of BFGS's estimate of the Hessian, 1 at first. With y = g - g_old and the last
   displacement p = t_old d_old:  h = | h - ((h p)^2 + eps) / (<p, h p> + eps) + (y^2 + eps) / (<y, p> + eps) |,
   unless one of the two products is below eps.
2. Direction. r = -g, s = r / (h + eps), rho = <r, s>.
   beta = rho / (rho_old + eps) (Fletcher-Reeves) or (rho - <r, s_old>) / (rho_old + eps) (Polak-Ribiere), within 0
   and 1;  d = s + beta d_old;  d = s at first.
3. Step size, without evaluating the loss again: if it has risen, the base rate shrinks by the table below, and a
   fraction c of the last direction is taken back:  d = ((1 - c) t d - c t_old d_old) / t.
4. w = w + t d.

The variant `released` has the program's own previous step, which is not the displacement: t_old is the learning rate of
the present step times the base rate before line 3, and d_old is the direction of line 2, before line 3 changed it.
Nothing is taken back if t is at most eps. In mode `online`, the program updates the average before the comparison.
Without a change of the rate both variants agree as long as line 3 takes nothing back.

Each line is a pass over the memory, because its factors need sums over the results of the line before: 19 reads and
writes of a value in all. If a step is masked, its factors change nothing. In the end g holds g / (h + eps).

In a sharded step the products of line 1 (and <r, s_old>) are summed in one message, and rho, which needs the new h, in
a second one. LARS, which comes before them, adds a third.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from podscale.config.optimizer import NlcgSection
from podscale.pytorch.optim.base import HyperParams, Optimizer, copy_where_finite, sum_fp64
from podscale.pytorch.optim.param_shard import ParamNorms, ParamShard
from podscale.pytorch.optim.sgd import add_weight_decay
from podscale.training import nlcg_rates
from podscale.training.nlcg_rates import EPS, LOSS_DECAY, RateMode


class NlcgPart(NamedTuple):
    """Part of the weights and their state, named as in the module's docstring; `s_old` for Polak-Ribiere only."""

    w: Tensor
    g: Tensor
    h: Tensor
    d: Tensor
    g_old: Tensor
    s_old: Tensor | None = None


class Nlcg(Optimizer):
    """Preconditioned nonlinear conjugate gradient (see the module)."""

    def __init__(self, shard: ParamShard, section: NlcgSection) -> None:
        self._shard, self._section, self._norms = shard, section, ParamNorms(shard)
        self._dtype = shard.weights.dtype
        self.moments = {"curvature": shard.zeros().fill_(1.0), "direction": shard.zeros(), "gradient": shard.zeros()}
        if section.beta == "polak_ribiere":
            self.moments["descent"] = shard.zeros()
        self._is_released = section.variant == "released"
        self._rate_control = LossRateControl(
            section.step, section.tolerance, shard.device, updates_first=self._is_released
        )
        self._steps, self._rho, self._old_rate = (torch.zeros((), device=shard.device) for _ in range(3))
        self.scalars = {"updates": self._steps, "rho": self._rho, "moved": self._old_rate}
        self.scalars |= self._rate_control.scalars
        is_batch_norm = torch.tensor([each.is_batch_norm for each in shard.param_slices], device=shard.device)
        self._norm_scale = torch.where(is_batch_norm, section.norm_gradient_scale, 1.0)
        self._parts = [NlcgPart(*chunk) for chunk in shard.contiguous_chunks(*self.moments.values())]

    @torch.no_grad()
    def step(self, hyper: HyperParams, finite: Tensor) -> Tensor:
        for group in self._shard.groups:
            add_weight_decay(group, hyper.weight_decay)
        finite = self._scale_gradients(finite)
        # Memory for intermediate values of a part, allocated once: fresh pages cost more than the operations.
        scratch = self._shard.weights.new_empty(2, max((len(part.g) for part in self._parts), default=0))
        finite, (y_d, d_hd, r_s_old) = self._products(finite, scratch[0])
        old_rate = hyper.learning_rate * self.scalars["base_rate"] if self._is_released else self._old_rate
        rho = self._precondition(finite, y_d, d_hd, old_rate, scratch)
        beta = ((rho - r_s_old) / (self._rho + EPS)).clamp(0.0, 1.0)
        beta = torch.where(self._is_due(self._section.restart_every), 0.0, beta)
        base_rate, taken_back = self._rate_control(hyper.loss, self._steps, finite)
        t = hyper.learning_rate * base_rate
        if self._is_released:
            self._move_and_keep_direction(beta, taken_back, t, old_rate, finite)
        else:
            self._move(beta, taken_back, t, finite)
        for part in self._parts:
            if part.s_old is not None:
                part.s_old.lerp_(part.g.neg_(), finite.to(self._dtype))
        copy_where_finite(finite, self._rho, rho.to(self._dtype))
        copy_where_finite(finite, self._old_rate, t)
        self._steps += finite
        return finite

    def _move(self, beta: Tensor, taken_back: Tensor, t: Tensor, finite: Tensor) -> None:
        """Run lines 2 to 4. All are scalars."""
        reverse = torch.where(t > 0, taken_back * self._old_rate / t, 0.0)
        d_factor = torch.where(finite, (1.0 - taken_back) * beta - reverse, 1.0).to(self._dtype)
        g_factor = torch.where(finite, taken_back - 1.0, 0.0)
        w_factor = torch.where(finite, t, 0.0)
        for part in self._parts:
            part.d.mul_(d_factor).addcmul_(part.g, g_factor)
            part.w.addcmul_(part.d, w_factor)

    def _move_and_keep_direction(
        self, beta: Tensor, taken_back: Tensor, t: Tensor, old_rate: Tensor, finite: Tensor
    ) -> None:
        """Run lines 2 to 4 of the variant `released`, whose d keeps the direction of line 2. All are scalars."""
        taken_back = torch.where(t > EPS, taken_back, 0.0)
        old_factor = torch.where(finite, -taken_back * old_rate, 0.0)
        new_factor = torch.where(finite, (1.0 - taken_back) * t, 0.0)
        d_factor, g_factor = torch.where(finite, beta, 1.0).to(self._dtype), -finite.to(self._dtype)
        for part in self._parts:
            part.w.addcmul_(part.d, old_factor)
            part.d.mul_(d_factor).addcmul_(part.g, g_factor)
            part.w.addcmul_(part.d, new_factor)

    def _products(self, finite: Tensor, scratch: Tensor) -> tuple[Tensor, Tensor]:
        """Return whether all ranks are finite, and <y, d_old>, <d_old, h d_old> and <r, s_old> (0 without s_old)."""
        sums = list[Tensor]()
        for part in self._parts:
            values = scratch[: len(part.g)]
            sums.append(sum_fp64(torch.sub(part.g, part.g_old, out=values).mul_(part.d)))
            sums.append(sum_fp64(torch.mul(part.h, part.d, out=values).mul_(part.d)))
            if part.s_old is None:
                sums.append(sums[0].new_zeros(()))
            else:
                sums.append(sum_fp64(torch.mul(part.g, part.s_old, out=values).neg_()))
        local = torch.stack(sums).view(-1, 3).sum(0) if sums else self._shard.weights.new_zeros(3, dtype=torch.float64)
        finite, (products,) = self._shard.sum_over_ranks(finite, local)
        return finite, products

    def _precondition(self, finite: Tensor, y_d: Tensor, d_hd: Tensor, old_rate: Tensor, scratch: Tensor) -> Tensor:
        """Run line 1 from <y, d_old>, <d_old, h d_old> and t_old; returns rho. Replaces g by g / (h + eps), g_old by g.

        With a = -t_old^2 / (<p, h p> + eps), b = 1 / (<y, p> + eps) and c the sum of the terms with eps,
        h = |h + a (h d_old)^2 + b y^2 + c|. If h is not to change, a, b and c are 0.
        """
        y_p, p_hp = y_d * old_rate, d_hd * old_rate.square()
        forgets = finite & self._is_due(self._section.forget_every)
        changes = finite & ~forgets & (y_p >= EPS) & (p_hp >= EPS)
        a = torch.where(changes, -old_rate.square() / (p_hp + EPS), 0.0).to(self._dtype)
        b = torch.where(changes, 1.0 / (y_p + EPS), 0.0).to(self._dtype)
        c = torch.where(changes, EPS / (y_p + EPS) - EPS / (p_hp + EPS), 0.0).to(self._dtype)
        is_applied, remembers = finite.to(self._dtype), (~forgets).to(self._dtype)
        sums = list[Tensor]()
        for part in self._parts:
            first, second = scratch[0, : len(part.g)], scratch[1, : len(part.g)]
            hd = torch.mul(part.h, part.d, out=first)
            part.h.addcmul_(torch.mul(hd, a, out=second), hd)
            y = torch.sub(part.g, part.g_old, out=first)
            part.h.addcmul_(torch.mul(y, b, out=second), y).add_(c).abs_()
            if self._section.forget_every:
                part.h.mul_(remembers).add_(1.0 - remembers)
            part.g_old.lerp_(part.g, is_applied)  # exact at 0 and at 1
            part.g.div_(torch.add(part.h, EPS, out=first))
            sums.append(sum_fp64(torch.mul(part.g, part.g_old, out=first)))
        return self._shard.sum_over_ranks(finite, self._shard.sum_local(sums))[1][0][0]

    def _scale_gradients(self, finite: Tensor) -> Tensor:
        """Scale the gradients of batch norm, and those with trust ratio by  l |w| / (|g| + eps + 0.1 l |w|)  (LARS).

        Parameters whose weights are all zero are not scaled, unlike in the authors' program: they would never move.
        """
        lars, scale = self._section.lars_coefficient, self._norm_scale
        if lars == 0 and self._section.norm_gradient_scale == 1.0:
            return finite
        if lars:
            w, g = list[Tensor](), list[Tensor]()
            for group in self._shard.groups:
                w += torch._foreach_norm(group.weight_chunks)
                g += torch._foreach_norm(group.gradient_chunks)
            finite, (w_norm, g_norm) = self._norms(finite, w, g)
            scaled_norm = lars * w_norm
            ratio = scaled_norm / (g_norm * scale + EPS + 0.1 * scaled_norm)
            scale = scale * torch.where(self._shard.uses_trust_ratio & (w_norm > 0), ratio, 1.0)
        gradients = [part for group in self._shard.groups for part in group.gradients]
        for part, factor in zip(gradients, self._shard.per_part(scale), strict=True):
            part.mul_(factor)
        return finite

    def _is_due(self, every: int) -> Tensor:
        """Return True at step 0 and, unless `every` is 0, at its multiples."""
        return torch.remainder(self._steps, every) == 0 if every else self._steps == 0


class LossRateControl:
    """Line 3 of the module's docstring: base rate and fraction of the last direction to take back, from the loss.

    If `updates_first`, mode `online` compares with the average that includes the loss of the step.
    """

    def __init__(self, mode: RateMode, tolerance: float, device: torch.device, *, updates_first: bool = False) -> None:
        self._mode, self._updates_first = mode, updates_first
        self._base = torch.full((), nlcg_rates.MAX_BASE_RATE, device=device)
        self._average, self._before = torch.zeros((), device=device), torch.zeros((), device=device)
        self.scalars = {"base_rate": self._base, "loss_average": self._average, "loss_before": self._before}
        self._limits, self._factors, self._fractions = (
            torch.tensor(column, device=device) for column in nlcg_rates.rate_table(mode, tolerance)
        )

    def __call__(self, loss: Tensor, step: Tensor, finite: Tensor) -> tuple[Tensor, Tensor]:
        """Return base rate and fraction of `step`, from 0; masked steps do not count."""
        if self._mode == "none":
            return self._base, torch.zeros_like(self._base)
        is_first = step == 0
        average = torch.where(is_first, loss, LOSS_DECAY * self._average + (1.0 - LOSS_DECAY) * loss)
        if self._mode == "step":
            is_compared, rise = torch.remainder(step, nlcg_rates.COMPARE_EVERY_STEPS) == 0, average / self._before
        else:
            is_compared, rise = torch.ones_like(is_first), loss / (average if self._updates_first else self._average)
        is_compared = is_compared & ~is_first
        row = (rise > self._limits).sum().view(1)  # a Python index would wait for the device
        factor, fraction = self._factors.index_select(0, row)[0], self._fractions.index_select(0, row)[0]
        base = (self._base * factor).clamp(nlcg_rates.MIN_BASE_RATE, nlcg_rates.MAX_BASE_RATE)
        copy_where_finite(finite & is_compared, self._base, base)
        copy_where_finite(finite & (is_compared | is_first), self._before, average)
        copy_where_finite(finite, self._average, average)
        return self._base, torch.where(is_compared, fraction, 0.0)
