"""Stochastic gradient descent with momentum, Nesterov's form on request (Sutskever 2013, section 2)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from podscale.pytorch.optim.base import Slot, where_finite


class Sgd:
    """d = g + weight_decay * w;  m = momentum * m + d;  w -= rate * (d + momentum * m if nesterov else m)."""

    def __init__(self, slots: Sequence[Slot], *, momentum: float, nesterov: bool, weight_decay: float) -> None:
        self.slots = list(slots)
        self._momentum, self._nesterov, self._weight_decay = momentum, nesterov, weight_decay

    @torch.no_grad()
    def step(self, gradients: list[Tensor], learning_rate: float, finite: Tensor) -> None:
        weights = [slot.parameter for slot in self.slots]
        momenta = [slot.momentum for slot in self.slots]
        add_decay(self.slots, gradients, self._weight_decay)
        torch._foreach_mul_(gradients, where_finite(finite, 1.0, 0.0))
        torch._foreach_mul_(momenta, where_finite(finite, self._momentum, 1.0))
        torch._foreach_add_(momenta, gradients)
        updates = momenta
        if self._nesterov:
            torch._foreach_add_(gradients, momenta, alpha=self._momentum)
            updates = gradients
        torch._foreach_add_(weights, torch._foreach_mul(updates, where_finite(finite, -learning_rate, 0.0)))


def add_decay(slots: list[Slot], gradients: list[Tensor], weight_decay: float) -> None:
    """g += weight_decay * w for every slot that decays."""
    decaying = [(g, slot.parameter) for slot, g in zip(slots, gradients, strict=True) if slot.decays]
    if decaying and weight_decay:
        torch._foreach_add_([g for g, _ in decaying], [w for _, w in decaying], alpha=weight_decay)
