"""LAMB (You 2020) in NVIDIA's form: the whole gradient is clipped first, the moments are corrected.

g = g / max(1, |g over all parameters| / clip_norm);  u = d + weight_decay * w;  w -= rate * |w| / |u| * u
with d what `Moments` make of g.
The ratio |w| / |u| is 1 where a norm is zero, and for segments that do not adapt.
"""

import torch
from torch import Tensor

from podscale.pytorch.optim.base import HyperParams, where_finite
from podscale.pytorch.optim.moments import AdamMoments
from podscale.pytorch.optim.momentum import add_weight_decay
from podscale.pytorch.optim.norms import ParamNorms
from podscale.pytorch.optim.share import ParamShard


class Lamb:
    """See the module's text. clip_norm: 0 leaves gradients as they are. clip: a ratio above 1 becomes 1."""

    def __init__(
        self, shard: ParamShard, *, beta2: float, eps: float = 1e-6, clip_norm: float = 1.0, clip: bool = False
    ) -> None:
        self._shard, self._norms = shard, ParamNorms(shard)
        self._moments, self._clip_norm, self._clip = AdamMoments(shard, beta2=beta2, eps=eps), clip_norm, clip
        self.moments, self.scalars = self._moments.values, {"updates": self._moments.updates}

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
        away = self._shard.per_part(where_finite(finite, -rate, 0.0))
        for group in self._shard.groups:
            torch._foreach_addcmul_(group.weights, group.gradients, away[group.first : group.last])
        return finite

    def _clip_factor(self, norms: Tensor, finite: Tensor) -> Tensor:
        """The factor that clips the gradient; 0 where the update is masked."""
        whole = norms.double().square().sum().sqrt().float()
        factor = 1.0 / (whole / self._clip_norm).clamp(min=1.0) if self._clip_norm else torch.ones_like(whole)
        return where_finite(finite, factor, 0.0)

    def _directions(self, hyper: HyperParams, shrink: Tensor, finite: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Updates the moments and leaves u in the gradients; the norms of weights and of u, piece by piece."""
        corrections = self._moments.bias_corrections(hyper.momentum, finite)
        w, u = list[Tensor](), list[Tensor]()
        for number, group in enumerate(self._shard.groups):
            torch._foreach_mul_(group.gradients, shrink)
            self._moments.write_directions(number, hyper.momentum, corrections, finite)
            add_weight_decay(group, hyper.weight_decay)
            w += torch._foreach_norm(group.weight_chunks)
            u += torch._foreach_norm(group.gradient_chunks)
        return w, u
