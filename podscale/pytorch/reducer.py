"""Gradients in one flat fp32 buffer of fixed layout, averaged bucket by bucket while backward is still running.

Autograd accumulates straight into views of the buffer. When the last gradient of a bucket is there, the bucket is
handed to a lane that averages buckets strictly in order: a thread on gloo, a side stream on NCCL. Layout and order
never depend on timing, so that the same run gives the same bits, with or without overlap, resumed or not (torch's
DistributedDataParallel changes its buckets after the first step and does not).

Beside the gradients the buffer has room for `extra` values that every rank wants averaged, at no further message:
the loss and the running statistics of batch norm.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from podscale.config.model import AllReduceSection
from podscale.pytorch.allreduce import AllReduce, build_all_reduce
from podscale.pytorch.lane import build_lane
from podscale.pytorch.layout import plan_layout, view_like
from podscale.pytorch.world import World


class Reducer(Protocol):
    """Owns the gradients of one update."""

    module: nn.Module
    """What the forward pass calls."""
    extra: Tensor
    """Further fp32 values to average over the ranks; written before the last backward pass of an update."""

    @property
    def gradients(self) -> list[Tensor]:
        """The gradient of each parameter, in the order of the model's parameters; valid after `finish`."""
        ...

    @property
    def buffers(self) -> list[Tensor]:
        """The same memory in as few tensors as possible, `extra` included."""
        ...

    def begin(self) -> None:
        """Zeroes the gradients for a new update."""
        ...

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Adds the gradient of `loss`; reduces during the `last` pass of an update only."""
        ...

    def finish(self) -> None:
        """Returns when all averages are in place (on a GPU: in order on the current stream)."""
        ...

    def close(self) -> None:
        """Detaches from the model and ends the lane."""
        ...


def build_reducer(section: AllReduceSection, model: nn.Module, world: World, *, extra: int = 1) -> Reducer:
    """The reducer of a document's all_reduce section. Every rank must call this at the same time."""
    if section.algorithm == "ddp":
        return DdpReducer(model, world, bucket_mb=section.bucket_mb, extra=extra)
    return FlatReducer(
        model,
        build_all_reduce(section, world),
        world,
        bucket_mb=section.bucket_mb,
        overlap=section.overlap,
        extra=extra,
    )


class FlatReducer:
    """Our own reducer; see the module's text."""

    def __init__(
        self,
        model: nn.Module,
        all_reduce: AllReduce,
        world: World,
        *,
        bucket_mb: float = 25.0,
        overlap: bool = True,
        extra: int = 1,
    ) -> None:
        self.module = model
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._overlap = overlap
        self._lane = build_lane(all_reduce, world.device)
        # Backward reaches the last layers first, so the layout runs backwards; `extra` is needed last.
        backwards = list(reversed(self._parameters))
        # A multiple of the world's size can be cut into the shards of any algorithm.
        layout = plan_layout([p.numel() for p in backwards] + [extra], int(bucket_mb * 2**20) // 4, world.size)
        self.layout = layout
        self.flat = torch.zeros(layout.length, dtype=torch.float32, device=world.device)
        self._buckets = [self.flat[start:stop] for start, stop in layout.bounds]
        self._views = [view_like(self.flat, start, p) for start, p in zip(layout.starts, backwards, strict=False)]
        self._views.reverse()
        self.extra = self.flat[layout.starts[-1] : layout.starts[-1] + extra]
        self._bucket_of = dict(zip(map(id, backwards), layout.buckets, strict=False))
        self._missing: list[int] = []
        self._next = 0
        self._reducing = False
        for parameter, view in zip(self._parameters, self._views, strict=True):
            parameter.grad = view
        self._hooks = [p.register_post_accumulate_grad_hook(self._accumulated) for p in self._parameters]

    @property
    def gradients(self) -> list[Tensor]:
        return self._views

    @property
    def buffers(self) -> list[Tensor]:
        return [self.flat]

    def begin(self) -> None:
        self.flat.zero_()
        self._missing = [0] * len(self._buckets)
        for bucket in self._bucket_of.values():
            self._missing[bucket] += 1
        self._next = 0

    def backward(self, loss: Tensor, *, last: bool) -> None:
        self._reducing = last
        loss.backward()
        self._reducing = False

    def finish(self) -> None:
        self._launch(len(self._buckets))
        self._lane.wait()
        assert all(p.grad is view for p, view in zip(self._parameters, self._views, strict=True)), (
            "a gradient left the flat buffer: zero_grad() belongs to the reducer"
        )

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._lane.close()

    def _accumulated(self, parameter: Tensor) -> None:
        """Autograd calls this when a parameter's gradient of one pass is in place."""
        if not self._reducing:
            return
        self._missing[self._bucket_of[id(parameter)]] -= 1
        if self._overlap:
            ready = self._next
            while ready < len(self._buckets) and self._missing[ready] == 0:
                ready += 1
            self._launch(ready)

    def _launch(self, until: int) -> None:
        """Hands over the buckets up to `until`, in order: the order of messages must be the same on every rank."""
        while self._next < until:
            self._lane.submit(self._buckets[self._next])
            self._next += 1


class DdpReducer:
    """torch's DistributedDataParallel behind the same interface: the baseline to compare with."""

    def __init__(self, model: nn.Module, world: World, *, bucket_mb: float = 25.0, extra: int = 1) -> None:
        # The running statistics of batch norm are averaged through `extra`, so DDP need not copy those of rank 0.
        devices = [world.device] if world.on_gpu else None
        self.module: nn.Module = DistributedDataParallel(
            model, device_ids=devices, bucket_cap_mb=bucket_mb, broadcast_buffers=False, gradient_as_bucket_view=True
        )
        self._parameters: Sequence[nn.Parameter] = [p for p in model.parameters() if p.requires_grad]
        self._ranks = world.size
        self.extra = torch.zeros(extra, device=world.device)

    @property
    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self._parameters if p.grad is not None]

    @property
    def buffers(self) -> list[Tensor]:
        return [*self.gradients, self.extra]

    def begin(self) -> None:
        self.module.zero_grad(set_to_none=False)
        self.extra.zero_()

    def backward(self, loss: Tensor, *, last: bool) -> None:
        loss.backward()

    def finish(self) -> None:
        dist.all_reduce(self.extra.div_(self._ranks))

    def close(self) -> None:
        pass


@contextmanager
def accumulating(reducer: Reducer, *, last: bool) -> Iterator[None]:
    """Around one forward and backward pass; DDP decides in the forward pass whether its backward will reduce."""
    wrapped = reducer.module
    with wrapped.no_sync() if isinstance(wrapped, DistributedDataParallel) and not last else nullcontext():
        yield
