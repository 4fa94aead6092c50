"""SGD with momentum and Nesterov's form (Sutskever 2013, section 2); the momentum update that LARS and others share."""

import logging
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Literal, Protocol

import torch
from torch import Tensor

from podscale.pytorch.optim.base import HyperParams, Optimizer, where_finite
from podscale.pytorch.optim.param_shard import ParamShard, PartGroup
from podscale.util.kernel_errors import kernel_errors

log = logging.getLogger(__name__)

MomentumForm = Literal["unscaled", "scaled", "ratio_inside"]
"""Position of the learning rate and LARS's trust ratio (Kumar 2019, table 1; You 2017, algorithm 1).

unscaled: both inside the momentum buffer, so that a change of them affects new gradients only. scaled: both outside, so
that a change rescales the whole buffer. ratio_inside: the ratio inside, the learning rate outside.
"""


def add_weight_decay(group: PartGroup, weight_decay: Tensor) -> None:
    """Add weight_decay * w to the gradients of the parts that decay; `weight_decay` is a scalar."""
    gradients = [group.gradients[i] for i in group.decayed_parts]
    weights = [group.weights[i] for i in group.decayed_parts]
    if weights:
        factors = [weight_decay if mask is None else weight_decay * mask for mask in group.masks]
        torch._foreach_addcmul_(gradients, weights, factors)


class MomentumUpdate(Protocol):
    """Momentum update of a shard: as lists of operations here, in two kernels in `fused_momentum`."""

    values: Tensor
    """Momentum buffers, fp32, in the order of the shard."""

    def norms(
        self, weight_decay: Tensor, *, of_sum: bool
    ) -> tuple[Sequence[Tensor] | Tensor, Sequence[Tensor] | Tensor]:
        """Return the norms of weights and gradients of each chunk; if `of_sum`, of g + `weight_decay` * w for g."""
        ...

    def step(
        self, inside: Tensor, outside: Tensor, momentum: Tensor, weight_decay: Tensor, finite: Tensor, *, decayed: bool
    ) -> None:
        """Step the weights, or change nothing if not finite. Overwrites the gradients.

        Args:
            inside: factor inside the momentum buffer, scalar or [parameters] (see `MomentumForm`).
            outside: factor outside of it, likewise.
            momentum: decay of the buffer, scalar.
            weight_decay: scalar.
            finite: bool scalar.
            decayed: weight decay was added by `norms(of_sum=True)`.
        """
        ...


def build_momentum_update(shard: ParamShard, *, nesterov: bool) -> MomentumUpdate:
    """Build the fused update on a GPU if Triton is installed and finds its C compiler, else lists of operations."""
    if shard.device.type == "cuda" and find_spec("triton"):
        from podscale.pytorch.optim.fused_momentum import FusedMomentum

        fused = FusedMomentum(shard, nesterov=nesterov)
        try:
            fused.compile()
        except kernel_errors() as error:
            log.warning(f"momentum runs in many small kernels: Triton cannot compile the fused ones: {error}")
        else:
            return fused
    return ForeachMomentum(shard, nesterov=nesterov)


class ForeachMomentum(MomentumUpdate):
    """Momentum update by lists of operations.

    u = inside * g;  m = momentum * m + u;  w -= outside * (u + momentum * m if nesterov else m).
    """

    def __init__(self, shard: ParamShard, *, nesterov: bool) -> None:
        self._shard, self._nesterov = shard, nesterov
        self.values = shard.zeros()
        self._views = shard.views(self.values)

    def norms(self, weight_decay: Tensor, *, of_sum: bool) -> tuple[list[Tensor], list[Tensor]]:
        """Return the norms (see `MomentumUpdate`). If `of_sum`, leaves g + weight_decay * w in the gradients."""
        w, g = list[Tensor](), list[Tensor]()
        for group in self._shard.groups:
            if of_sum:
                add_weight_decay(group, weight_decay)
            w += torch._foreach_norm(group.weight_chunks)
            g += torch._foreach_norm(group.gradient_chunks)
        return w, g

    def step(
        self, inside: Tensor, outside: Tensor, momentum: Tensor, weight_decay: Tensor, finite: Tensor, *, decayed: bool
    ) -> None:
        inside_factors = self._shard.per_part(where_finite(finite, inside, 0.0))
        outside_factors = self._shard.per_part(where_finite(finite, -outside, 0.0))
        keep = where_finite(finite, momentum, 1.0)
        for group, momenta in zip(self._shard.groups, self._views, strict=True):
            if not decayed:
                add_weight_decay(group, weight_decay)
            directions, parts = group.gradients, slice(group.first, group.last)
            torch._foreach_mul_(momenta, keep)
            if self._nesterov:
                torch._foreach_mul_(directions, inside_factors[parts])
                torch._foreach_add_(momenta, directions)
                torch._foreach_addcmul_(directions, momenta, [momentum] * len(momenta))
                torch._foreach_addcmul_(group.weights, directions, outside_factors[parts])
            else:
                torch._foreach_addcmul_(momenta, directions, inside_factors[parts])
                torch._foreach_addcmul_(group.weights, momenta, outside_factors[parts])


def momentum_factors(form: MomentumForm, rate: Tensor, ratio: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors inside and outside of the momentum buffer; `rate` is a scalar, `ratio` too or [parameters]."""
    match form:
        case "unscaled":
            return rate * ratio, torch.ones_like(rate)
        case "scaled":
            return torch.ones_like(rate), rate * ratio
        case "ratio_inside":
            return ratio, rate


class Sgd(Optimizer):
    """SGD: d = g + weight_decay * w, then momentum (see `ForeachMomentum`), scaled by default as in Goyal 2017.

    Scaled: m = momentum * m + d;  w -= rate * (d + momentum * m if nesterov else m). In the unscaled form the rate is
    inside the buffer, and a momentum schedule can correct for its changes (Goyal 2017, section 3; Codreanu 2017).
    """

    def __init__(self, shard: ParamShard, *, nesterov: bool, form: MomentumForm = "scaled") -> None:
        self._shard, self._form = shard, form
        self._momentum = build_momentum_update(shard, nesterov=nesterov)
        self.moments, self.scalars = {"momentum": self._momentum.values}, dict[str, Tensor]()

    @torch.no_grad()
    def step(self, hyper: HyperParams, finite: Tensor) -> Tensor:
        finite, _ = self._shard.sum_over_ranks(finite)
        inside, outside = momentum_factors(self._form, hyper.learning_rate, torch.ones_like(hyper.learning_rate))
        self._momentum.step(inside, outside, hyper.momentum, hyper.weight_decay, finite, decayed=False)
        return finite
