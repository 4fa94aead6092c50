"""Stochastic gradient descent with momentum, Nesterov's form on request (Sutskever 2013, section 2)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from podscale.pytorch.optim.base import Hyper, Slot
from podscale.pytorch.optim.momentum import add_decay, apply_momentum


class Sgd:
    """d = g + weight_decay * w;  m = momentum * m + d;  w -= rate * (d + momentum * m if nesterov else m)."""

    def __init__(self, slots: Sequence[Slot], *, nesterov: bool) -> None:
        self.slots = list(slots)
        self._nesterov = nesterov

    @torch.no_grad()
    def step(self, hyper: Hyper, finite: Tensor) -> Tensor:
        add_decay(self.slots, hyper.weight_decay)
        apply_momentum(
            self.slots,
            inside=torch.ones_like(hyper.learning_rate),
            outside=hyper.learning_rate,
            momentum=hyper.momentum,
            nesterov=self._nesterov,
            finite=finite,
        )
        return finite
