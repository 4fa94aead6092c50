"""Update rules over a few named arrays: the share of one rank, or of several that exchange their sums in memory."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from podscale.layout import plan_layout
from podscale.pytorch.optim import Hyper, Optimizer, Periodic, Segment, Share
from tests.support.updates import STEPS, Arrays, Values, gradients, momentum, rate


class FlatArrays:
    """Flat weights and gradients of these arrays; `share()` is what a rank that owns everything updates."""

    def __init__(self, weights: Arrays, decays: Mapping[str, bool], adapts: Mapping[str, bool] | None = None) -> None:
        layout = plan_layout([w.size for w in weights.values()], 10**9, 1)
        self.segments = [
            Segment(name, start, w.size, decays[name], (adapts or decays)[name], w.shape, strides_of(w))
            for (name, w), start in zip(weights.items(), layout.starts, strict=True)
        ]
        self.shapes = {name: w.shape for name, w in weights.items()}
        self.weights, self.gradients = torch.zeros(layout.length), torch.zeros(layout.length)
        self.put(self.weights, weights)

    def share(self, owned: Sequence[tuple[int, int]] = (), exchange: Callable[[Tensor], Tensor] | None = None) -> Share:
        whole = [(0, len(self.weights))]
        return Share(self.segments, owned or whole, self.weights, self.gradients, exchange)

    def put(self, flat: Tensor, arrays: Arrays) -> None:
        for segment in self.segments:
            flat[segment.start : segment.start + segment.size] = torch.from_numpy(arrays[segment.name].reshape(-1))

    def take(self, flat: Tensor) -> dict[str, np.ndarray[Any, Any]]:
        return {
            s.name: flat[s.start : s.start + s.size].numpy().reshape(self.shapes[s.name]).copy() for s in self.segments
        }

    def step(
        self, optimizer: Optimizer, gradients: Arrays, hyper: Hyper, *, finite: bool = True, number: int = 0
    ) -> bool:
        self.put(self.gradients, gradients)
        if isinstance(optimizer, Periodic):
            optimizer.begin(number)
        return bool(optimizer.step(hyper, torch.tensor(finite)))

    def train(
        self, optimizer: Optimizer, decay: float, *, first: int = 0, times: float = 1.0, beta: float | None = None
    ) -> Values:
        """The weights after the steps from `first` on.

        times: what the rate is multiplied by. beta: constant momentum; default: one that changes.
        """
        for step in range(first, STEPS):
            row = hyper(times * rate(step), beta or momentum(step), decay)
            assert self.step(optimizer, gradients(step), row, number=step)
        return self.take(self.weights)


def strides_of(array: np.ndarray[Any, Any]) -> tuple[int, ...]:
    """In elements, of the array laid out row by row."""
    return tuple(int(np.prod(array.shape[dim + 1 :])) for dim in range(array.ndim))


def hyper(rate: float, momentum: float = 0.9, decay: float = 1e-2, loss: float = 2.0) -> Hyper:
    return Hyper(*(torch.tensor(value, dtype=torch.float32) for value in (rate, momentum, decay, loss)))
