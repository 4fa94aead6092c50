"""The two moments of Adam, corrected for having begun at 0 (Kingma 2015, algorithm 1); LAMB begins with them too."""

import torch
from torch import Tensor

from podscale.pytorch.optim.base import where_finite
from podscale.pytorch.optim.share import ParamShard


class AdamMoments:
    """m = b1 * m + (1 - b1) * g;  v = b2 * v + (1 - b2) * g^2;  m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)

    with b1 the schedule's momentum and t the updates carried out so far, this one included. Moments are fp32.
    """

    def __init__(self, shard: ParamShard, *, beta2: float, eps: float) -> None:
        self._shard, self._beta2, self._eps = shard, beta2, eps
        self.updates = torch.zeros((), device=shard.device)
        self.values = {"momentum": shard.zeros(), "variance": shard.zeros()}
        self._views = [shard.views(values) for values in self.values.values()]

    def bias_corrections(self, beta1: Tensor, finite: Tensor) -> tuple[Tensor, Tensor]:
        """Counts the update, unless it is masked: the factors that correct m and the root of v, fp32 scalars."""
        self.updates += finite
        count = self.updates.clamp(min=1.0).double()
        return (1.0 / (1.0 - beta1.double() ** count)).float(), (1.0 / (1.0 - self._beta2**count)).sqrt().float()

    def write_directions(self, number: int, beta1: Tensor, corrections: tuple[Tensor, Tensor], finite: Tensor) -> None:
        """Leaves the directions of group `number` in its gradients, which are zero where not finite.

        There the moments stay as they are, to the bit.
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
