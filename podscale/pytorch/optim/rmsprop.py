"""RMSProp (Hinton 2012, lecture 6e) with momentum, a baseline: that of Inception's training (Szegedy 2016).

d = g + weight_decay * w;  v = decay * v + (1 - decay) * d^2;  u = d / (sqrt(v) + eps), then momentum (see `Momentum`).

| as in      | v starts at | eps         | form     |
|------------|-------------|-------------|----------|
| torch      | 0           | beside root | scaled   |
| TensorFlow | 1           | in the root | unscaled |
"""

from typing import Literal

import torch
from torch import Tensor

from podscale.pytorch.optim.base import HyperParams, where_finite
from podscale.pytorch.optim.momentum import MomentumForm, add_weight_decay, build_momentum_update, momentum_factors
from podscale.pytorch.optim.share import ParamShard

RmsPropVariant = Literal["torch", "tensorflow"]


class RmsProp:
    """See the module's text; the form is free. Not torch's own, which has no mask and takes momentum from the host."""

    def __init__(
        self,
        shard: ParamShard,
        *,
        decay: float = 0.9,
        eps: float = 1e-8,
        variant: RmsPropVariant = "torch",
        form: MomentumForm = "scaled",
    ) -> None:
        self._shard, self._decay, self._eps, self._variant, self._form = shard, decay, eps, variant, form
        self._momentum = build_momentum_update(shard, nesterov=False)
        variance = shard.zeros() if variant == "torch" else torch.ones_like(shard.zeros())
        self.moments, self.scalars = {"momentum": self._momentum.values, "variance": variance}, dict[str, Tensor]()
        self._views = shard.views(variance)

    @torch.no_grad()
    def step(self, hyper: HyperParams, finite: Tensor) -> Tensor:
        finite = self._shard.mask_nonfinite(finite)
        keep = torch.where(finite, self._decay, 1.0)
        for group, variance in zip(self._shard.groups, self._views, strict=True):
            add_weight_decay(group, where_finite(finite, hyper.weight_decay, 0.0))
            torch._foreach_mul_(variance, keep)
            torch._foreach_addcmul_(variance, group.gradients, group.gradients, 1.0 - self._decay)
            torch._foreach_div_(group.gradients, self._denominators(variance))
        inside, outside = momentum_factors(self._form, hyper.learning_rate, torch.ones_like(hyper.learning_rate))
        none = torch.zeros_like(hyper.weight_decay)
        self._momentum.step(inside, outside, hyper.momentum, none, finite, decayed=True)
        return finite

    def _denominators(self, variance: list[Tensor]) -> tuple[Tensor, ...]:
        if self._variant == "torch":
            roots = torch._foreach_sqrt(variance)
            torch._foreach_add_(roots, self._eps)
        else:
            roots = torch._foreach_add(variance, self._eps)
            torch._foreach_sqrt_(roots)
        return roots
