"""A training step without its arithmetic: real parameters, real autograd, real reducers; computing is waited for.

Two cores cannot compute for eight ranks. So one step of the real network is measured alone on one core: when, after
backward began, each parameter's gradient was there. A replayed step waits as long, in autograd's own order, and hands
over gradients of the same shapes at the same moments; hooks, buckets, collectives and links are the real ones.
"""

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from podscale.config import ModelSection
from podscale.pytorch.models import build_model


@dataclass(frozen=True)
class Trace:
    """A measured step. ready: seconds from the start of backward to each parameter's gradient, in the order of
    `shapes`, which is the model's. forward, update: seconds of the rest.
    """

    shapes: tuple[torch.Size, ...]
    ready: tuple[float, ...]
    forward: float
    update: float

    @property
    def backward(self) -> float:
        return max(self.ready)

    @property
    def step(self) -> float:
        return self.forward + self.backward + self.update

    @property
    def bytes(self) -> int:
        """Of the gradients, in fp32."""
        return 4 * sum(shape.numel() for shape in self.shapes)

    def stretched(self, factor: float) -> "Trace":
        """The same step on a processor 1/factor as fast."""
        ready = tuple(seconds * factor for seconds in self.ready)
        return Trace(self.shapes, ready, self.forward * factor, self.update * factor)


def record(model: ModelSection, classes: int, side: int, batch: int, rounds: int = 3) -> Trace:
    """The fastest of a few steps of a real network on this process's threads: forward, backward, SGD with momentum."""
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
        begin = time.perf_counter()
        loss = nn.functional.cross_entropy(network(images), labels)
        turned = time.perf_counter()
        loss.backward()
        back = time.perf_counter()
        optimizer.step()
        done = time.perf_counter()
        ready = tuple(times[parameter] - turned for parameter in parameters)
        traces.append(Trace(tuple(p.shape for p in parameters), ready, turned - begin, done - back))
    return min(traces[1:], key=lambda trace: trace.step)


class _Clock:
    """Waits until so many seconds after backward began."""

    start: float | None = None

    def until(self, seconds: float) -> None:
        if self.start is None:
            self.start = time.perf_counter()
        left = self.start + seconds - time.perf_counter()
        if left > 0:
            time.sleep(left)


class _Gradient(torch.autograd.Function):
    """Passes its input on; in backward, waits and gives a parameter its gradient."""

    @staticmethod
    def forward(ctx: Any, through: Tensor, parameter: Tensor, gradient: Tensor, clock: _Clock, at: float) -> Tensor:
        ctx.gradient, ctx.clock, ctx.at = gradient, clock, at
        return through.clone()

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor | None, ...]:
        ctx.clock.until(ctx.at)
        return above[0], ctx.gradient, None, None, None


class Replay(nn.Module):
    """Stands in for a network: forward waits, backward delivers gradients, all of `value`, at the trace's times."""

    def __init__(self, trace: Trace, value: float) -> None:
        super().__init__()
        self._trace = trace
        self.hurry = False
        """Wait for nothing and deliver all gradients at once."""
        self.tensors = nn.ParameterList(torch.empty(shape) for shape in trace.shapes)  # never read, so never in memory
        largest = max(shape.numel() for shape in trace.shapes)
        filled = torch.full((largest,), value)  # one for all: eight ranks of AlexNet would not fit otherwise
        self._gradients = [filled[: shape.numel()].view(shape) for shape in trace.shapes]

    def forward(self, through: Tensor) -> Tensor:
        trace = self._trace.stretched(0.0) if self.hurry else self._trace
        time.sleep(trace.forward)
        clock = _Clock()
        for parameter, gradient, at in zip(self.tensors, self._gradients, trace.ready, strict=True):
            through = _Gradient.apply(through, parameter, gradient, clock, at)
        return through


def pieces(size: int, largest: int = 2**19) -> Trace:
    """A trace without times whose `size` bytes of gradients come in tensors of at most `largest` elements."""
    elements, shapes = size // 4, []
    while elements:
        shapes.append(torch.Size([min(elements, largest)]))
        elements -= shapes[-1].numel()
    return Trace(tuple(shapes), (0.0,) * len(shapes), 0.0, 0.0)
