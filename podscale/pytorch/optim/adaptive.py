"""Optimizers with second moments: Adam and AdamW, LAMB, RMSProp.

Adam (Kingma 2015, algorithm 1): weight decay as part of the gradient, as in torch, or decoupled (AdamW; Loshchilov
2019). torch's own kernels take beta 1 from the host, but our momentum schedule is on the device, and those for lists of
tensors have no mask.

LAMB (You 2020) in NVIDIA's form, which clips the whole gradient first and corrects the moments:
g = g / max(1, |g over all parameters| / clip_norm);  u = d + weight_decay * w;  w -= rate * |w| / |u| * u
with d the direction of `AdamMoments` for g. |w| / |u| is 1 if a norm is zero and for parameters without trust ratio.

RMSProp (Hinton 2012, lecture 6e) with momentum, as in Inception's training (Szegedy 2016):
d = g + weight_decay * w;  v = decay * v + (1 - decay) * d^2;  u = d / (sqrt(v) + eps), then momentum (see `sgd`).

| as in      | v starts at | eps         | form     |
|------------|-------------|-------------|----------|
| torch      | 0           | beside root | scaled   |
| TensorFlow | 1           | in the root | unscaled |
"""

from typing import Literal

import torch
from torch import Tensor

from podscale.pytorch.optim.base import HyperParams, Optimizer, where_finite
from podscale.pytorch.optim.param_shard import ParamNorms, ParamShard
from podscale.pytorch.optim.sgd import MomentumForm, add_weight_decay, build_momentum_update, momentum_factors


class AdamMoments:
    """Moments m and v of Adam and LAMB, and their direction.

    m = b1 * m + (1 - b1) * g;  v = b2 * v + (1 - b2) * g^2;  direction = m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)

    with b1 the schedule's momentum and t the steps applied so far, this one included. Moments are fp32.
    """

    def __init__(self, shard: ParamShard, *, beta2: float, eps: float) -> None:
        self._shard, self._beta2, self._eps = shard, beta2, eps
        self.steps = torch.zeros((), device=shard.device)
        self.values = {"momentum": shard.zeros(), "variance": shard.zeros()}
        self._views = [shard.views(values) for values in self.values.values()]

    def bias_corrections(self, beta1: Tensor, finite: Tensor) -> tuple[Tensor, Tensor]:
        """Count the step if it is `finite`, and return the factors that correct m and the root of v.

        All are scalars on the device: `beta1` and the factors fp32, `finite` bool.
        """
        self.steps += finite
        count = self.steps.clamp(min=1.0).double()
        return (1.0 / (1.0 - beta1.double() ** count)).float(), (1.0 / (1.0 - self._beta2**count)).sqrt().float()

    def write_directions(self, number: int, beta1: Tensor, corrections: tuple[Tensor, Tensor], finite: Tensor) -> None:
        """Replace the gradients of group `number` by the directions.

        If `finite` is False, the gradients must be zero, and the moments stay unchanged, to the bit. `beta1` is an fp32
        scalar, `corrections` are the result of `bias_corrections`.
        """
        group, (first, second) = self._shard.groups[number], corrections
        m, v = self._views[0][number], self._views[1][number]
        torch._foreach_mul_(m, where_finite(finite, beta1, 1.0))
        torch._foreach_addcmul_(m, group.gradients, [1.0 - beta1] * len(m))
        torch._foreach_mul_(v, torch.where(finite, self._beta2, 1.0))
        torch._foreach_addcmul_(v, group.gradients, group.gradients, 1.0 - self._beta2)
        torch._foreach_copy_(group.gradients, v)
        torch._foreach_sqrt_(group.gradients)
        torch._foreach_mul_(group.gradients, second)
        torch._foreach_add_(group.gradients, self._eps)
        torch._foreach_reciprocal_(group.gradients)
        torch._foreach_mul_(group.gradients, m)
        torch._foreach_mul_(group.gradients, first)


class Adam(Optimizer):
    """Adam: w -= rate * u with the direction u of `AdamMoments` for g + weight_decay * w.

    If `decoupled` (AdamW), u is for g alone, and w -= rate * weight_decay * w.
    """

    def __init__(self, shard: ParamShard, *, beta2: float = 0.999, eps: float = 1e-8, decoupled: bool = False) -> None:
        self._shard, self._decoupled = shard, decoupled
        self._moments = AdamMoments(shard, beta2=beta2, eps=eps)
        self.moments, self.scalars = self._moments.values, {"updates": self._moments.steps}

    @torch.no_grad()
    def step(self, hyper: HyperParams, finite: Tensor) -> Tensor:
        finite = self._shard.mask_nonfinite(finite)
        decay, rate = where_finite(finite, hyper.weight_decay, 0.0), where_finite(finite, -hyper.learning_rate, 0.0)
        corrections = self._moments.bias_corrections(hyper.momentum, finite)
        for number, group in enumerate(self._shard.groups):
            if not self._decoupled:
                add_weight_decay(group, decay)
            self._moments.write_directions(number, hyper.momentum, corrections, finite)
            if self._decoupled:
                add_weight_decay(group, decay)
            torch._foreach_addcmul_(group.weights, group.gradients, [rate] * len(group.weights))
        return finite


class Lamb(Optimizer):
    """LAMB (see the module). `clip_norm` 0 leaves the gradient as it is; with `clip` a ratio above 1 becomes 1."""

    def __init__(
        self, shard: ParamShard, *, beta2: float, eps: float = 1e-6, clip_norm: float = 1.0, clip: bool = False
    ) -> None:
        self._shard, self._norms = shard, ParamNorms(shard)
        self._moments, self._clip_norm, self._clip = AdamMoments(shard, beta2=beta2, eps=eps), clip_norm, clip
        self.moments, self.scalars = self._moments.values, {"updates": self._moments.steps}

    @torch.no_grad()
    def step(self, hyper: HyperParams, finite: Tensor) -> Tensor:
        g = [norm for group in self._shard.groups for norm in torch._foreach_norm(group.gradient_chunks)]
        finite, (norms,) = self._norms(finite, g)
        directions = self._directions(hyper, self._clip_factor(norms, finite), finite)
        _, (w, u) = self._norms(finite, *directions)
        ratio = torch.where((w > 0) & (u > 0), w / u, 1.0)
        if self._clip:
            ratio = ratio.clamp(max=1.0)
        rate = hyper.learning_rate * torch.where(self._shard.uses_trust_ratio, ratio, 1.0)
        factors = self._shard.per_part(where_finite(finite, -rate, 0.0))
        for group in self._shard.groups:
            torch._foreach_addcmul_(group.weights, group.gradients, factors[group.first : group.last])
        return finite

    def _clip_factor(self, norms: Tensor, finite: Tensor) -> Tensor:
        """Return the factor that clips the gradient; 0 if the step is masked."""
        total = norms.double().square().sum().sqrt().float()
        factor = 1.0 / (total / self._clip_norm).clamp(min=1.0) if self._clip_norm else torch.ones_like(total)
        return where_finite(finite, factor, 0.0)

    def _directions(self, hyper: HyperParams, clip: Tensor, finite: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Update the moments, replace the gradients by u, and return the norms of weights and u of each chunk."""
        corrections = self._moments.bias_corrections(hyper.momentum, finite)
        w, u = list[Tensor](), list[Tensor]()
        for number, group in enumerate(self._shard.groups):
            torch._foreach_mul_(group.gradients, clip)
            self._moments.write_directions(number, hyper.momentum, corrections, finite)
            add_weight_decay(group, hyper.weight_decay)
            w += torch._foreach_norm(group.weight_chunks)
            u += torch._foreach_norm(group.gradient_chunks)
        return w, u


RmsPropVariant = Literal["torch", "tensorflow"]


class RmsProp(Optimizer):
    """RMSProp (see the module). torch's own has no mask and takes the momentum from the host."""

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
        zero = torch.zeros_like(hyper.weight_decay)
        self._momentum.step(inside, outside, hyper.momentum, zero, finite, decayed=True)
        return finite

    def _denominators(self, variance: list[Tensor]) -> tuple[Tensor, ...]:
        if self._variant == "torch":
            roots = torch._foreach_sqrt(variance)
            torch._foreach_add_(roots, self._eps)
        else:
            roots = torch._foreach_add(variance, self._eps)
            torch._foreach_sqrt_(roots)
        return roots
