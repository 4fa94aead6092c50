"""Layer-wise adaptive rate scaling in the form of the MLPerf reference (You 2017; Kumar 2019, section 4).

ratio = eta * |w| / (|g| + weight_decay * |w| + eps), 1 where a norm is zero;  d = g + weight_decay * w
m = momentum * m + rate * ratio * d;  w -= m, or with Nesterov w -= momentum * m + rate * ratio * d.
The learning rate stands inside the momentum buffer. Slots that do not adapt (batch norm, biases) get ratio 1.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from podscale.pytorch.optim.base import Hyper, Slot
from podscale.pytorch.optim.momentum import add_decay, apply_momentum


class Lars:
    """See the module's text. Norms are taken in fp32, of whole tensors, after averaging over the ranks."""

    def __init__(self, slots: Sequence[Slot], *, nesterov: bool, trust_coefficient: float, eps: float) -> None:
        self.slots = list(slots)
        self._adapts = torch.tensor([slot.adapts for slot in slots], device=slots[0].weight.device)
        self._nesterov = nesterov
        self._trust_coefficient, self._eps = trust_coefficient, eps

    @torch.no_grad()
    def step(self, hyper: Hyper, finite: Tensor) -> Tensor:
        rates = self._rates(hyper.learning_rate, hyper.weight_decay)
        add_decay(self.slots, hyper.weight_decay)
        apply_momentum(
            self.slots,
            inside=rates,
            outside=torch.ones_like(hyper.learning_rate),
            momentum=hyper.momentum,
            nesterov=self._nesterov,
            finite=finite,
        )
        return finite

    def _rates(self, rate: Tensor, weight_decay: Tensor) -> Tensor:
        """The learning rate times the trust ratio of each slot, fp32 [slots]."""
        w = torch.stack(torch._foreach_norm([slot.weight for slot in self.slots]))
        g = torch.stack(torch._foreach_norm([slot.gradient for slot in self.slots]))
        ratio = self._trust_coefficient * w / (g + weight_decay * w + self._eps)
        return rate * torch.where(self._adapts & (w > 0) & (g > 0), ratio, 1.0)
