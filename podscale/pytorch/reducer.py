"""Gradient reduction: average gradients over the ranks bucket by bucket, while backward is still running.

When the last gradient of a bucket is ready, the bucket's gradients are copied into the flat buffer, whatever their
dtype, and the bucket is submitted to a `CommQueue`, which averages buckets in order. Layout and order never depend on
timing, so the same run gives the same bits, with or without overlap, resumed or not. (torch's DistributedDataParallel
rebuilds its buckets after the first step, so a resumed run may differ in the last bits.)

For a sharded optimizer step the average stops after the reduce-scatter: each rank holds its shard of every bucket.

The extra values of a step, its loss and batch norm's running statistics, share the last bucket. int8 messages would
round a small statistic beside a large one to 0, so with them these values have their own bucket, averaged in fp32.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from podscale.config.train import AllReduceSection
from podscale.distributed.waits import GRADIENTS, waiting_for, waiting_for_bucket
from podscale.pytorch.all_reduce import AllReduce, FlatAllReduce, ShardedAllReduce, build_all_reduce
from podscale.pytorch.comm_queue import Wait, build_comm_queue
from podscale.pytorch.flat_buffers import GradientBuffer, strided_like
from podscale.pytorch.world import World


class GradientReducer(Protocol):
    """Reducer that averages the gradients of one step over the ranks."""

    module: nn.Module
    """Module that the forward pass calls."""
    buffer: GradientBuffer
    """Holds the averages after `finish`. The caller writes `extra_values` before the last backward pass of a step."""
    sharded_all_reduce: ShardedAllReduce | None
    """Gathers the shards of a sharded optimizer step; None if every rank holds all averages."""

    def start_step(self) -> None:
        """Start a new sum of gradients, and zero the extra values."""
        ...

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Run backward from `loss` (scalar) and add the gradients. Only the `last` pass of a step reduces them."""
        ...

    def finish(self) -> None:
        """Return when all averages are in place (on a GPU: ordered on the current stream)."""
        ...

    def close(self) -> None:
        """Remove the hooks from the model and close the queue."""
        ...


def build_reducer(
    section: AllReduceSection, model: nn.Module, world: World, *, extra: int = 1, sharded: bool = False
) -> GradientReducer:
    """Build the reducer of a document's all_reduce section. Every rank must call this at the same time.

    Args:
        extra: number of values per rank that are averaged along with the gradients.
        sharded: stop after the reduce-scatter, for a sharded optimizer step.
    """
    if section.algorithm == "ddp":
        return DdpReducer(model, world, bucket_mb=section.bucket_mb, extra=extra)
    return BucketedReducer(
        model,
        build_all_reduce(section, world),
        world,
        bucket_mb=section.bucket_mb,
        overlap=section.overlap,
        extra=extra,
        extra_all_reduce=FlatAllReduce(world) if section.sends_int8 else None,
        sharded=sharded,
    )


def no_sync_unless_last(reducer: GradientReducer, *, last: bool) -> AbstractContextManager[None]:
    """Suppress DDP's reduction in all passes but the last: DDP decides in forward whether backward reduces."""
    module = reducer.module
    return module.no_sync() if isinstance(module, DistributedDataParallel) and not last else nullcontext()


class BucketedReducer(GradientReducer):
    """Bucketed reducer with any all-reduce algorithm, overlapped with backward.

    Args:
        bucket_mb: size of a bucket, MiB of fp32.
        overlap: submit a bucket as soon as it is complete, not after backward.
        extra: number of values per rank that are averaged along with the gradients.
        extra_all_reduce: averages the extra values in a bucket of their own; default: `all_reduce`, with gradients.
        sharded: stop after the reduce-scatter, for a sharded optimizer step.
    """

    def __init__(  # noqa: PLR0913 (options of train.all_reduce, and what is averaged along)
        self,
        model: nn.Module,
        all_reduce: AllReduce,
        world: World,
        *,
        bucket_mb: float,
        overlap: bool = True,
        extra: int = 1,
        extra_all_reduce: AllReduce | None = None,
        sharded: bool = False,
    ) -> None:
        self.module, self.all_reduce, self._overlap = model, all_reduce, overlap
        self._last_all_reduce = extra_all_reduce or all_reduce
        self.sharded_all_reduce = _require_sharded(all_reduce) if sharded else None
        self.buffer = GradientBuffer(
            model,
            world.device,
            bucket_elements=int(bucket_mb * 2**20) // 4,
            multiple=world.size,  # so that any algorithm can cut a bucket into its shards
            extra=extra,
            isolate_extra=extra_all_reduce is not None,
            shards=self.sharded_all_reduce.shards if self.sharded_all_reduce else 1,
            shard=self.sharded_all_reduce.shard if self.sharded_all_reduce else 0,
        )
        self._buckets = self.buffer.buckets
        self._comm_queue = build_comm_queue(world.device)
        self._waits: list[Wait] = []
        parameters = list(self.buffer.parameters.values())
        numbers = reversed(self.buffer.layout.buckets[:-1])  # the layout runs backwards and ends with the extra values
        self._bucket_of = dict(zip(map(id, parameters), numbers, strict=True))
        self._members: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self._buckets]
        for parameter, view in zip(parameters, self.buffer.views, strict=True):
            self._members[self._bucket_of[id(parameter)]].append((parameter, view))
        self._pending_counts: list[int] = []
        self._next_bucket, self._is_first_pass, self._reducing = 0, True, False
        self._hooks = [p.register_post_accumulate_grad_hook(self._on_gradient_ready) for p in parameters]

    def start_step(self) -> None:
        self.buffer.extra_values.zero_()
        self._next_bucket, self._is_first_pass = 0, True

    def backward(self, loss: Tensor, *, last: bool) -> None:
        self._pending_counts = [len(members) for members in self._members]
        self._reducing = last
        with waiting_for(GRADIENTS):  # on a GPU, hooks run in autograd's threads while this thread waits for them
            loss.backward()
        self._reducing = False
        for number, pending in enumerate(self._pending_counts):
            if pending:  # some of its parameters took no part in this pass
                self._copy_to_bucket(number)
        self._is_first_pass = False

    def finish(self) -> None:
        with waiting_for(GRADIENTS):
            self._submit_buckets(len(self._buckets))
            waits, self._waits = self._waits, []
            for wait in waits:
                wait()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._comm_queue.close()

    def _on_gradient_ready(self, parameter: Tensor) -> None:
        """Copy the bucket if this gradient was the last one missing in this pass, and submit it; called by autograd."""
        number = self._bucket_of[id(parameter)]
        self._pending_counts[number] -= 1
        if self._pending_counts[number] == 0:
            self._copy_to_bucket(number)
            if self._reducing and self._overlap:
                ready = self._next_bucket
                while ready < len(self._buckets) and self._pending_counts[ready] == 0:
                    ready += 1
                self._submit_buckets(ready)

    @torch.no_grad()
    def _copy_to_bucket(self, number: int) -> None:
        """Move a bucket's gradients of this pass into the flat buffer: copy those of the first pass, add later ones."""
        views, gradients = [], []
        for parameter, view in self._members[number]:
            if parameter.grad is not None:
                views.append(view)
                gradients.append(strided_like(parameter.grad, view))
                parameter.grad = None
            elif self._is_first_pass:
                view.zero_()
        if views:
            (torch._foreach_copy_ if self._is_first_pass else torch._foreach_add_)(views, gradients)

    def _submit_buckets(self, until: int) -> None:
        """Submit the buckets before number `until`, in order: the order of messages must be the same on every rank."""
        while self._next_bucket < until:
            self._waits.append(self._comm_queue.submit(partial(self._average_bucket, self._next_bucket)))
            self._next_bucket += 1

    def _average_bucket(self, number: int) -> None:
        """Average a bucket in place: all of it, or this rank's shard."""
        bucket = self._buckets[number]
        with waiting_for_bucket(number + 1):
            if number == len(self._buckets) - 1:  # it holds the extra values and is not sharded
                self._last_all_reduce(bucket)
            elif self.sharded_all_reduce is None:
                self.all_reduce(bucket)
            else:
                self.buffer.averages[number].copy_(self.sharded_all_reduce.reduce_scatter(bucket))


class DdpReducer(GradientReducer):
    """torch's DistributedDataParallel behind the same interface, as a baseline."""

    def __init__(self, model: nn.Module, world: World, *, bucket_mb: float, extra: int) -> None:
        # The running statistics of batch norm are averaged through `extra`, so DDP need not copy those of rank 0.
        devices = [world.device] if world.on_gpu else None
        self.module: nn.Module = DistributedDataParallel(
            model, device_ids=devices, bucket_cap_mb=bucket_mb, broadcast_buffers=False, gradient_as_bucket_view=True
        )
        self.buffer = GradientBuffer(model, world.device, bucket_elements=1, extra=extra)
        self.sharded_all_reduce: ShardedAllReduce | None = None
        self._ranks = world.size

    def start_step(self) -> None:
        self.module.zero_grad(set_to_none=False)
        self.buffer.extra_values.zero_()

    def backward(self, loss: Tensor, *, last: bool) -> None:
        with waiting_for(GRADIENTS):
            loss.backward()

    def finish(self) -> None:
        """Average the extra values and copy DDP's averages into the flat buffer."""
        with waiting_for(GRADIENTS):
            dist.all_reduce(self.buffer.extra_values.div_(self._ranks))
        gradients = [p.grad for p in self.buffer.parameters.values() if p.grad is not None]
        torch._foreach_copy_(self.buffer.views, gradients)

    def close(self) -> None:
        pass


def _require_sharded(all_reduce: AllReduce) -> ShardedAllReduce | None:
    """Return the all-reduce as a sharded one, or None if it has one shard only."""
    assert isinstance(all_reduce, ShardedAllReduce), type(all_reduce)  # checked with the run document
    return all_reduce if all_reduce.shards > 1 else None
