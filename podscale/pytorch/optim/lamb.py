"""LAMB (You 2020) in NVIDIA's form: the whole gradient is clipped first, the moments are corrected.

With b1 the schedule's momentum, t the updates carried out so far, this one included, and moments in fp32:
g = g / max(1, |g over all parameters| / clip_norm);  m = b1 * m + (1 - b1) * g;  v = b2 * v + (1 - b2) * g^2
u = m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay * w;  w -= rate * |w| / |u| * u
The ratio |w| / |u| is 1 where a norm is zero, and for segments that do not adapt.
"""

import torch
from torch import Tensor

from podscale.pytorch.optim.base import Hyper, where_finite
from podscale.pytorch.optim.momentum import add_decay
from podscale.pytorch.optim.norms import Norms
from podscale.pytorch.optim.share import Group, Share


class Lamb:
    """See the module's text. clip_norm: 0 leaves gradients as they are. clip: a ratio above 1 becomes 1."""

    def __init__(
        self, share: Share, *, beta2: float, eps: float = 1e-6, clip_norm: float = 1.0, clip: bool = False
    ) -> None:
        self._share, self._norms = share, Norms(share)
        self._beta2, self._eps, self._clip_norm, self._clip = beta2, eps, clip_norm, clip
        self._updates = torch.zeros((), device=share.device)
        self.moments = {"momentum": share.zeros(), "variance": share.zeros()}
        self.scalars = {"updates": self._updates}
        self._views = [share.views(values) for values in self.moments.values()]

    @torch.no_grad()
    def step(self, hyper: Hyper, finite: Tensor) -> Tensor:
        g = [norm for group in self._share.groups for norm in torch._foreach_norm(group.gradient_pieces)]
        finite, (norms,) = self._norms(finite, g)
        self._updates += finite
        directions = self._directions(hyper, self._shrink(norms, finite), finite)
        _, (w, u) = self._norms(finite, *directions)
        ratio = torch.where((w > 0) & (u > 0), w / u, 1.0)
        if self._clip:
            ratio = ratio.clamp(max=1.0)
        rate = hyper.learning_rate * torch.where(self._share.adapts, ratio, 1.0)
        away = self._share.per_part(where_finite(finite, -rate, 0.0))
        for group in self._share.groups:
            torch._foreach_addcmul_(group.weights, group.gradients, away[group.first : group.last])
        return finite

    def _shrink(self, norms: Tensor, finite: Tensor) -> Tensor:
        """The factor that clips the gradient; 0 where the update is masked."""
        whole = norms.double().square().sum().sqrt().float()
        factor = 1.0 / (whole / self._clip_norm).clamp(min=1.0) if self._clip_norm else torch.ones_like(whole)
        return where_finite(finite, factor, 0.0)

    def _directions(self, hyper: Hyper, shrink: Tensor, finite: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Updates the moments and leaves u in the gradients; the norms of weights and of u, piece by piece."""
        beta1, count = hyper.momentum.double(), self._updates.clamp(min=1.0).double()
        first = (1.0 / (1.0 - beta1**count)).float()
        second = (1.0 / (1.0 - self._beta2**count)).sqrt().float()
        w, u = list[Tensor](), list[Tensor]()
        for group, *moments in zip(self._share.groups, *self._views, strict=True):
            torch._foreach_mul_(group.gradients, shrink)
            self._average(group, moments[0], moments[1], hyper.momentum, finite)
            torch._foreach_copy_(group.gradients, moments[1])
            torch._foreach_sqrt_(group.gradients)
            torch._foreach_mul_(group.gradients, second)
            torch._foreach_add_(group.gradients, self._eps)
            torch._foreach_reciprocal_(group.gradients)
            torch._foreach_mul_(group.gradients, moments[0])
            torch._foreach_mul_(group.gradients, first)
            add_decay(group, hyper.weight_decay)
            w += torch._foreach_norm(group.weight_pieces)
            u += torch._foreach_norm(group.gradient_pieces)
        return w, u

    def _average(self, group: Group, m: list[Tensor], v: list[Tensor], beta1: Tensor, finite: Tensor) -> None:
        """Takes the gradients into both moments, or leaves them to the bit where not finite."""
        torch._foreach_mul_(m, where_finite(finite, beta1, 1.0))
        torch._foreach_addcmul_(m, group.gradients, [1.0 - beta1] * len(m))
        torch._foreach_mul_(v, torch.where(finite, self._beta2, 1.0))
        torch._foreach_addcmul_(v, group.gradients, group.gradients, 1.0 - self._beta2)
