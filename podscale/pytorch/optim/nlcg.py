"""Preconditioned nonlinear conjugate gradient (Adya 2018), as the authors' released program has it (apple/ml-ncg).

All parameters are one vector w, g is the gradient of the loss and of the L2 decay, t = learning rate * base rate:

1. Preconditioner, the diagonal h of BFGS's estimate of the Hessian, 1 at first. With y = g - g_old and the last
   displacement p = t_old d_old:  h = | h - ((h p)^2 + eps) / (<p, h p> + eps) + (y^2 + eps) / (<y, p> + eps) |,
   unless one of the two products is below eps.
2. Direction. r = -g, s = r / (h + eps), rho = <r, s>.
   beta = rho / (rho_old + eps) (Fletcher-Reeves) or (rho - <r, s_old>) / (rho_old + eps) (Polak-Ribiere), within 0
   and 1;  d = s + beta d_old;  d = s at first.
3. Step size, without evaluating the loss again: where it has risen, the base rate shrinks by the table below, and a
   share c of the last direction is taken back:  d = ((1 - c) t d - c t_old d_old) / t.
4. w = w + t d.

Each line is a pass over the memory, because its factors need sums over what the line before left: 19 reads and writes
of a value in all, of which a factor that changes nothing masks those that would. In the end g holds g / (h + eps).

Where the update is sharded, the products of line 1 (and <r, s_old>) travel in one message, and rho, which needs the new
h, in a second; LARS, which comes before all of it, would be a third.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from podscale.pytorch.optim.base import HyperParams, copy_where_finite, sum_fp64
from podscale.pytorch.optim.param_shard import ParamNorms, ParamShard
from podscale.pytorch.optim.sgd import add_weight_decay

EPS = 1e-8
LOSS_DECAY = 0.7
"""Of the running average of the loss."""
COMPARE_EVERY_STEPS = 5
"""Updates between two looks of `step` at that average."""
MIN_BASE_RATE, MAX_BASE_RATE = 1e-4, 1.0

RISES = (0.01, 0.025, 0.05, 0.075, 0.10, 0.125, 0.15)
"""Rises of the loss, as a share of it, that part the rows of the table; the tolerance multiplies them."""
SHRINKS = (1.0, 0.975, 0.95, 0.9, 0.8, 0.7, 0.5)
"""What the base rate is multiplied by above each of them; below the first it grows."""
TAKE_BACK_FRACTIONS = (0.0, 0.1, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)
"""The share of the last direction that is taken back below the first, and above each."""
GROWTH = {"step": 1.05, "online": 1.02}

Beta = Literal["fletcher_reeves", "polak_ribiere"]
PaceMode = Literal["step", "online", "none"]


class NlcgPart(NamedTuple):
    """Some of the weights and what is kept of each, by the names of the module's text; `s_old` for Polak-Ribiere."""

    w: Tensor
    g: Tensor
    h: Tensor
    d: Tensor
    g_old: Tensor
    s_old: Tensor | None = None


class Nlcg:
    """See the module's text.

    lars_coefficient: above 0, gradients of segments that adapt are scaled first (see `_scale`). norm_gradient_scale:
    multiplies those of batch norm. restart_every, forget_every: updates after which beta is 0, and h is 1; 0 = never.
    """

    def __init__(
        self,
        shard: ParamShard,
        *,
        beta: Beta = "fletcher_reeves",
        pace: PaceMode = "step",
        tolerance: float = 1.0,
        lars_coefficient: float = 0.0,
        norm_gradient_scale: float = 1.0,
        restart_every: int = 0,
        forget_every: int = 0,
    ) -> None:
        self._shard, self._norms = shard, ParamNorms(shard)
        self._polak_ribiere = beta == "polak_ribiere"
        self._lars = lars_coefficient
        self._restart_every, self._forget_every = restart_every, forget_every
        self.moments = {"curvature": shard.zeros().fill_(1.0), "direction": shard.zeros(), "gradient": shard.zeros()}
        if self._polak_ribiere:
            self.moments["descent"] = shard.zeros()
        self._pace = LossRateControl(pace, tolerance, shard.device)
        self._updates, self._rho, self._moved = (torch.zeros((), device=shard.device) for _ in range(3))
        self.scalars = {"updates": self._updates, "rho": self._rho, "moved": self._moved, **self._pace.scalars}
        of_norms = torch.tensor([segment.is_batch_norm for segment in shard.param_slices], device=shard.device)
        self._own_scale = torch.where(of_norms, norm_gradient_scale, 1.0)
        self._scaled = lars_coefficient > 0 or norm_gradient_scale != 1.0
        self._parts = [NlcgPart(*stretch) for stretch in shard.contiguous_chunks(*self.moments.values())]

    @torch.no_grad()
    def step(self, hyper: HyperParams, finite: Tensor) -> Tensor:
        for group in self._shard.groups:
            add_weight_decay(group, hyper.weight_decay)
        finite = self._scale(finite)
        room = self._shard.weights.new_empty(2, max((len(part.g) for part in self._parts), default=0))
        finite, (along, curved, towards_old) = self._products(finite, room)
        rho = self._precondition(finite, along * self._moved, curved * self._moved.square(), room)
        beta = ((rho - towards_old) / (self._rho + EPS)).clamp(0.0, 1.0)
        beta = torch.where(self._is_due(self._restart_every), 0.0, beta)
        base, taken_back = self._pace(hyper.loss, self._updates, finite)
        t = hyper.learning_rate * base
        against = torch.where(t > 0, taken_back * self._moved / t, 0.0)
        keep = torch.where(finite, (1.0 - taken_back) * beta - against, 1.0).float()
        turn = torch.where(finite, taken_back - 1.0, 0.0)
        move, takes_over = torch.where(finite, t, 0.0), finite.float()
        for part in self._parts:
            part.d.mul_(keep).addcmul_(part.g, turn)  # lines 2 and 3
            part.w.addcmul_(part.d, move)
            if part.s_old is not None:
                part.s_old.lerp_(part.g.neg_(), takes_over)
        copy_where_finite(finite, self._rho, rho.float())
        copy_where_finite(finite, self._moved, t)
        self._updates += finite
        return finite

    def _products(self, finite: Tensor, room: Tensor) -> tuple[Tensor, Tensor]:
        """Whether all ranks are finite; <y, d_old>, <d_old, h d_old> and, for Polak-Ribiere, <r, s_old>, else 0.

        room: two rows for what lies between operations, taken once for all parts: fresh memory for each costs more
        than what is done with it.
        """
        sums = list[Tensor]()
        for part in self._parts:
            own = room[0, : len(part.g)]
            sums.append(sum_fp64(torch.sub(part.g, part.g_old, out=own).mul_(part.d)))
            sums.append(sum_fp64(torch.mul(part.h, part.d, out=own).mul_(part.d)))
            if part.s_old is None:
                sums.append(sums[0].new_zeros(()))
            else:
                sums.append(sum_fp64(torch.mul(part.g, part.s_old, out=own).neg_()))
        found = torch.stack(sums).view(-1, 3).sum(0) if sums else self._shard.weights.new_zeros(3, dtype=torch.float64)
        finite, (products,) = self._shard.sum_over_ranks(finite, found)
        return finite, products

    def _precondition(self, finite: Tensor, along: Tensor, curved: Tensor, room: Tensor) -> Tensor:
        """Line 1, from <y, p> and <p, h p>; returns rho. g / (h + eps) takes the place of g, and g that of g_old.

        With a = -t_old^2 / (<p, h p> + eps), b = 1 / (<y, p> + eps) and c what both eps above the lines come to,
        h = |h + a (h d_old)^2 + b y^2 + c|; where nothing is to change, all three are 0.
        """
        forgets = finite & self._is_due(self._forget_every)
        bent = finite & ~forgets & (along >= EPS) & (curved >= EPS)
        a = torch.where(bent, -self._moved.square() / (curved + EPS), 0.0).float()
        b = torch.where(bent, 1.0 / (along + EPS), 0.0).float()
        c = torch.where(bent, EPS / (along + EPS) - EPS / (curved + EPS), 0.0).float()
        takes_over, remembers = finite.float(), (~forgets).float()
        sums = list[Tensor]()
        for part in self._parts:
            one, two = room[0, : len(part.g)], room[1, : len(part.g)]
            hd = torch.mul(part.h, part.d, out=one)
            part.h.addcmul_(torch.mul(hd, a, out=two), hd)
            y = torch.sub(part.g, part.g_old, out=one)
            part.h.addcmul_(torch.mul(y, b, out=two), y).add_(c).abs_()
            if self._forget_every:
                part.h.mul_(remembers).add_(1.0 - remembers)
            part.g_old.lerp_(part.g, takes_over)  # exact at 0 and at 1
            part.g.div_(torch.add(part.h, EPS, out=one))
            sums.append(sum_fp64(torch.mul(part.g, part.g_old, out=one)))
        return self._shard.sum_over_ranks(finite, self._shard.sum_local(sums))[1][0][0]

    def _scale(self, finite: Tensor) -> Tensor:
        """Gradients before anything else: those of batch norm, and LARS by  l |w| / (|g| + eps + 0.1 l |w|).

        Ours: a segment whose weights are all zero is not scaled, since it would never move.
        """
        if not self._scaled:
            return finite
        scale = self._own_scale
        if self._lars:
            w, g = list[Tensor](), list[Tensor]()
            for group in self._shard.groups:
                w += torch._foreach_norm(group.weight_chunks)
                g += torch._foreach_norm(group.gradient_chunks)
            finite, (w_norm, g_norm) = self._norms(finite, w, g)
            pull = self._lars * w_norm
            ratio = pull / (g_norm * scale + EPS + 0.1 * pull)
            scale = scale * torch.where(self._shard.uses_trust_ratio & (w_norm > 0), ratio, 1.0)
        parts = [part for group in self._shard.groups for part in group.gradients]
        for part, factor in zip(parts, self._shard.per_part(scale), strict=True):
            part.mul_(factor)
        return finite

    def _is_due(self, every: int) -> Tensor:
        """Whether so many updates have passed since this was the case last, as it is at the first."""
        return torch.remainder(self._updates, every) == 0 if every else self._updates == 0


class LossRateControl:
    """Line 3 of the module's text: the base rate, and the share of the last direction to take back, from the loss."""

    def __init__(self, pace: PaceMode, tolerance: float, device: torch.device) -> None:
        self._pace = pace
        self._base = torch.full((), MAX_BASE_RATE, device=device)
        self._average, self._before = torch.zeros((), device=device), torch.zeros((), device=device)
        self.scalars = {"base_rate": self._base, "loss_average": self._average, "loss_before": self._before}
        growth = GROWTH.get(pace, 1.0)
        self._rises = torch.tensor([1.0 + tolerance * rise for rise in RISES], device=device)
        self._factors = torch.tensor([growth, *SHRINKS], device=device)
        self._taken_back = torch.tensor(TAKE_BACK_FRACTIONS, device=device)

    def __call__(self, loss: Tensor, updates: Tensor, finite: Tensor) -> tuple[Tensor, Tensor]:
        """What holds for this update; `updates`: those carried out before it."""
        if self._pace == "none":
            return self._base, torch.zeros_like(self._base)
        first = updates == 0
        average = torch.where(first, loss, LOSS_DECAY * self._average + (1.0 - LOSS_DECAY) * loss)
        if self._pace == "step":
            compared, rise = torch.remainder(updates, COMPARE_EVERY_STEPS) == 0, average / self._before
        else:
            compared, rise = torch.ones_like(first), loss / self._average
        compared = compared & ~first
        row = (rise > self._rises).sum().view(1)  # indexing with a number would ask the device for it
        factor, taken_back = self._factors.index_select(0, row)[0], self._taken_back.index_select(0, row)[0]
        base = (self._base * factor).clamp(MIN_BASE_RATE, MAX_BASE_RATE)
        copy_where_finite(finite & compared, self._base, base)
        copy_where_finite(finite & (compared | first), self._before, average)
        copy_where_finite(finite, self._average, average)
        return self._base, torch.where(compared, taken_back, 0.0)
