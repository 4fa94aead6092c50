"""Update rules on a few named arrays: the shard of one rank, or of several ranks that exchange sums in memory."""

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from itertools import pairwise
from threading import Barrier
from typing import Any

import numpy as np
import torch
from torch import Tensor

from podscale.pytorch.optim import HyperParams, Optimizer, ParamShard, ParamSlice, StepAware
from podscale.training.param_layout import ALIGNMENT_ELEMENTS, plan_buckets
from tests.support.optimizer_oracles import STEPS, Arrays, Step, Values, gradients, momentum, rate


class FlatArrays:
    """Flat weights and gradients of these arrays; `share()` is the shard of a rank that owns all of them."""

    def __init__(
        self,
        weights: Arrays,
        decays: Mapping[str, bool],
        adapts: Mapping[str, bool] | None = None,
        norms: Collection[str] = (),
    ) -> None:
        layout = plan_buckets([w.size for w in weights.values()], 10**9, 1)
        self.segments = [
            ParamSlice(
                name, start, w.size, decays[name], (adapts or decays)[name], name in norms, w.shape, strides_of(w)
            )
            for (name, w), start in zip(weights.items(), layout.starts, strict=True)
        ]
        self.shapes = {name: w.shape for name, w in weights.items()}
        self.weights, self.gradients = torch.zeros(layout.length), torch.zeros(layout.length)
        self.put(self.weights, weights)

    def share(
        self, owned: Sequence[tuple[int, int]] = (), exchange: Callable[[Tensor], Tensor] | None = None
    ) -> ParamShard:
        everything = [(0, len(self.weights))]
        return ParamShard(self.segments, owned or everything, self.weights, self.gradients, exchange)

    def shares(self, ranks: int) -> list[ParamShard]:
        """Return the shards of this many ranks, equal parts of the same weights, to be stepped `in_turns`."""
        length = len(self.weights)
        bounds = [rank * length // ranks // ALIGNMENT_ELEMENTS * ALIGNMENT_ELEMENTS for rank in range(ranks)] + [length]
        ordered_sum = OrderedSum(ranks)
        return [
            self.share([(start, stop)], partial(ordered_sum.add, rank) if ranks > 1 else None)
            for rank, (start, stop) in enumerate(pairwise(bounds))
        ]

    def put(self, flat: Tensor, arrays: Arrays) -> None:
        for segment in self.segments:
            flat[segment.start : segment.start + segment.size] = torch.from_numpy(arrays[segment.name].reshape(-1))

    def take(self, flat: Tensor) -> dict[str, np.ndarray[Any, Any]]:
        return {
            s.name: flat[s.start : s.start + s.size].numpy().reshape(self.shapes[s.name]).copy() for s in self.segments
        }

    def step(
        self, optimizer: Optimizer, gradients: Arrays, hyper: HyperParams, *, finite: bool = True, number: int = 0
    ) -> bool:
        self.put(self.gradients, gradients)
        if isinstance(optimizer, StepAware):
            optimizer.start_step(number)
        return bool(optimizer.step(hyper, torch.tensor(finite)))

    def run(self, optimizer: Optimizer, step: Step, number: int = 0) -> None:
        """Run a step, and assert that it is applied unless it is masked."""
        given = step.gradients if step.finite else {name: 0 * g for name, g in step.gradients.items()}
        row = hyper(step.rate, step.momentum, step.decay)
        assert self.step(optimizer, given, row, finite=step.finite, number=number) == step.finite

    def train(
        self, optimizer: Optimizer, decay: float, *, first: int = 0, times: float = 1.0, beta: float | None = None
    ) -> Values:
        """Return the weights after the steps from `first` on.

        Args:
            times: factor of the learning rate.
            beta: constant momentum; default: one that changes.
        """
        for step in range(first, STEPS):
            row = hyper(times * rate(step), beta or momentum(step), decay)
            assert self.step(optimizer, gradients(step), row, number=step)
        return self.take(self.weights)


class OrderedSum:
    """Sum over ranks, in the same order for each rank."""

    def __init__(self, ranks: int) -> None:
        self._brought: list[Tensor] = [torch.zeros(0)] * ranks
        self._barrier = Barrier(ranks)

    def add(self, rank: int, values: Tensor) -> Tensor:
        self._brought[rank] = values
        self._barrier.wait(60)
        total = torch.stack(self._brought).sum(0)
        self._barrier.wait(60)
        return total


def in_turns(steps: Sequence[Callable[[], Tensor]]) -> list[Tensor]:
    """Step every rank; several ranks step in threads, because they wait for each other's sums."""
    if len(steps) == 1:
        return [steps[0]()]
    return list(_threads(len(steps)).map(lambda step: step(), steps))


@cache
def _threads(count: int) -> ThreadPoolExecutor:
    """Return threads that later steps use again, because torch prepares each new one."""
    return ThreadPoolExecutor(count)


def strides_of(array: np.ndarray[Any, Any]) -> tuple[int, ...]:
    """Return the row-major strides of an array, elements."""
    return tuple(int(np.prod(array.shape[dim + 1 :])) for dim in range(array.ndim))


def hyper(rate: float, momentum: float = 0.9, decay: float = 1e-2, loss: float = 2.0) -> HyperParams:
    return HyperParams(*(torch.tensor(value, dtype=torch.float32) for value in (rate, momentum, decay, loss)))
