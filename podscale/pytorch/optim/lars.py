"""Layer-wise adaptive rate scaling in the form of the MLPerf reference (You 2017; Kumar 2019, section 4).

ratio = eta * |w| / (|g| + weight_decay * |w| + eps), 1 where a norm is zero;  d = g + weight_decay * w
m = momentum * m + rate * ratio * d;  w -= m, or with Nesterov w -= momentum * m + rate * ratio * d.
The learning rate stands inside the momentum buffer. Slots that do not decay (batch norm, biases) get ratio 1.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from podscale.pytorch.optim.base import Slot, where_finite
from podscale.pytorch.optim.sgd import add_decay


class Lars:
    """See the module's text. Norms are taken in fp32, of whole tensors, after averaging over the ranks."""

    def __init__(
        self,
        slots: Sequence[Slot],
        *,
        momentum: float,
        nesterov: bool,
        weight_decay: float,
        trust_coefficient: float,
        eps: float,
    ) -> None:
        self.slots = list(slots)
        self._momentum, self._nesterov, self._weight_decay = momentum, nesterov, weight_decay
        self._trust_coefficient, self._eps = trust_coefficient, eps

    @torch.no_grad()
    def step(self, gradients: list[Tensor], learning_rate: float, finite: Tensor) -> None:
        weights = [slot.parameter for slot in self.slots]
        momenta = [slot.momentum for slot in self.slots]
        rates = self._rates(gradients, where_finite(finite, learning_rate, 0.0))
        add_decay(self.slots, gradients, self._weight_decay)
        torch._foreach_mul_(gradients, rates)
        torch._foreach_mul_(momenta, where_finite(finite, self._momentum, 1.0))
        torch._foreach_add_(momenta, gradients)
        updates = momenta
        if self._nesterov:
            torch._foreach_add_(gradients, momenta, alpha=self._momentum)
            updates = gradients
        torch._foreach_add_(weights, torch._foreach_mul(updates, where_finite(finite, -1.0, 0.0)))

    def _rates(self, gradients: list[Tensor], rate: Tensor) -> list[Tensor]:
        """The learning rate times the trust ratio of each slot, scalars on the device."""
        scaled = [(slot.parameter, g) for slot, g in zip(self.slots, gradients, strict=True) if slot.decays]
        if not scaled:
            return [rate] * len(self.slots)
        w = torch.stack(torch._foreach_norm([parameter for parameter, _ in scaled]))
        g = torch.stack(torch._foreach_norm([gradient for _, gradient in scaled]))
        ratio = self._trust_coefficient * w / (g + self._weight_decay * w + self._eps)
        ratios = iter((rate * torch.where((w > 0) & (g > 0), ratio, 1.0)).unbind())
        return [next(ratios) if slot.decays else rate for slot in self.slots]
