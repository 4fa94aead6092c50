"""Training step without its arithmetic: real parameters, autograd and reducers; computation is replaced by waiting.

Two cores cannot compute for eight ranks, so one step of the real model is measured on one core: the time of each
parameter's gradient after the start of backward. A replayed step delivers gradients of the same shapes at the same
times, in autograd's order. Hooks, buckets, collectives and links are the real ones.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from podscale.config import ModelSection
from podscale.pytorch.models import build_model


@dataclass(frozen=True)
class StepTrace:
    """Measured training step.

    Args:
        shapes: shapes of the parameters, in the order of the model.
        ready: seconds from the start of backward to each parameter's gradient.
        forward: seconds of the forward pass.
        optimizer: seconds of the optimizer's step.
    """

    shapes: tuple[torch.Size, ...]
    ready: tuple[float, ...]
    forward: float = 0.0
    optimizer: float = 0.0

    @classmethod
    def untimed(cls, shapes: Iterable[torch.Size]) -> "StepTrace":
        """Return a step of these gradients without waiting."""
        shapes = tuple(shapes)
        return cls(shapes, (0.0,) * len(shapes))

    @property
    def backward(self) -> float:
        return max(self.ready)

    @property
    def step(self) -> float:
        return self.forward + self.backward + self.optimizer

    @property
    def bytes(self) -> int:
        """Bytes of the fp32 gradients."""
        return 4 * sum(shape.numel() for shape in self.shapes)


def record_step(model: ModelSection, classes: int, side: int, batch: int, rounds: int = 3) -> StepTrace:
    """Measure a step of the real model with SGD and momentum, in this process; return the fastest of some rounds."""
    torch.manual_seed(0)
    network = build_model(model, classes).train()
    parameters = list(network.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=True)
    images, labels = torch.randn(batch, 3, side, side), torch.randint(0, classes, (batch,))
    times: dict[Tensor, float] = {}
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(lambda p: times.__setitem__(p, time.perf_counter()))
    traces = []
    for _ in range(rounds + 1):
        optimizer.zero_grad(set_to_none=False)
        start = time.perf_counter()
        loss = nn.functional.cross_entropy(network(images), labels)
        forward_end = time.perf_counter()
        loss.backward()
        backward_end = time.perf_counter()
        optimizer.step()
        step_end = time.perf_counter()
        ready = tuple(times[parameter] - forward_end for parameter in parameters)
        shapes = tuple(p.shape for p in parameters)
        traces.append(StepTrace(shapes, ready, forward_end - start, step_end - backward_end))
    return min(traces[1:], key=lambda trace: trace.step)


class _BackwardClock:
    """Time since the start of a backward pass."""

    start: float | None = None

    def sleep_until(self, seconds: float) -> None:
        if self.start is None:
            self.start = time.perf_counter()
        time.sleep(max(0.0, self.start + seconds - time.perf_counter()))


class _DeliverGradient(torch.autograd.Function):
    """Identity whose backward waits until `at` and then gives a parameter its gradient."""

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, parameter: Tensor, gradient: Tensor, clock: _BackwardClock, at: float
    ) -> Tensor:
        ctx.gradient, ctx.clock, ctx.at = gradient, clock, at
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        ctx.clock.sleep_until(ctx.at)
        return upstream[0], ctx.gradient, None, None, None


class ReplayedModel(nn.Module):
    """Model whose forward waits and whose backward delivers gradients, all of `value`, at the times of a trace."""

    def __init__(self, trace: StepTrace, value: float) -> None:
        super().__init__()
        self.trace = trace
        self.tensors = nn.ParameterList(torch.empty(shape) for shape in trace.shapes)  # never read, so never in memory
        largest = max(shape.numel() for shape in trace.shapes)
        filled = torch.full((largest,), value)  # shared: eight ranks of AlexNet would not fit otherwise
        self._gradients = [filled[: shape.numel()].view(shape) for shape in trace.shapes]

    def forward(self, value: Tensor) -> Tensor:
        time.sleep(self.trace.forward)
        clock = _BackwardClock()
        for parameter, gradient, at in zip(self.tensors, self._gradients, self.trace.ready, strict=True):
            value = _DeliverGradient.apply(value, parameter, gradient, clock, at)
        return value


def split_gradients(size: int, largest: int = 2**19) -> StepTrace:
    """Return an untimed step with `size` bytes of gradients, in tensors of at most `largest` elements."""
    full, rest = divmod(size // 4, largest)
    return StepTrace.untimed(torch.Size([length]) for length in [largest] * full + [rest] * (rest > 0))
