"""Flat buffers of one rank: gradients and fp32 master weights in one fixed layout (see `training.param_layout`).

Parameters and gradients are views of the buffers, in the memory order of the model's parameters.

If every rank steps all weights, fp32 parameters are views of the masters and need no copy. If the optimizer step is
sharded (Kumar 2019; Xu 2020), each rank steps its shard of every bucket, and the ranks of a row then gather the
weights, in fp32 or rounded to bf16 at half the volume. Then, and for parameters in half precision, the masters are
separate memory, and the parameters are rounded from them after every step.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from podscale.distributed.waits import OPTIMIZER, waiting_for
from podscale.pytorch.all_reduce import ShardedAllReduce
from podscale.training.param_layout import ALIGNMENT_ELEMENTS, plan_buckets


class GradientBuffer:
    """Gradients of one rank in one flat fp32 buffer. A reducer fills it, an optimizer reads it.

    Args:
        multiple: the length of every bucket is a multiple of this.
        extra: number of values that are averaged in the same messages: the loss and batch norm's running statistics. If
            there are several shards, they have a bucket of their own, which is not sharded.
        isolate_extra: give them a bucket of their own in any case.
        shard: index of this rank's shard, whose averages it holds.
    """

    def __init__(  # noqa: PLR0913 (layout of the buffer; the reducer sets all of it)
        self,
        model: nn.Module,
        device: torch.device,
        *,
        bucket_elements: int,
        multiple: int = 1,
        extra: int = 1,
        isolate_extra: bool = False,
        shards: int = 1,
        shard: int = 0,
    ) -> None:
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        # Backward reaches the last layers first, so the layout runs backwards; `extra` is needed last.
        lengths = [p.numel() for p in reversed(self.parameters.values())] + [extra]
        if shards > 1:
            multiple *= ALIGNMENT_ELEMENTS  # so that kernels can read shards in aligned vectors
        self.layout = plan_buckets(lengths, bucket_elements, multiple, isolate_last=isolate_extra or shards > 1)
        *starts, extra_start = self.layout.starts
        self.offsets = dict(zip(self.parameters, reversed(starts), strict=True))
        """First element of each parameter, by name."""
        self.flat = torch.zeros(self.layout.length, dtype=torch.float32, device=device)
        self.views = [view_like(self.flat, self.offsets[name], p) for name, p in self.parameters.items()]
        """The gradient of each parameter, in the order of the model's parameters."""
        self.extra_values = self.flat[extra_start : extra_start + extra]
        self.local_ranges = (
            [(0, extra_start)] if shards == 1 else [*_shard_ranges(self.layout.bounds[:-1], shards, shard)]
        )
        """[start, stop) of this rank's averaged gradients in `flat`."""
        self.averages = [self.flat[start:stop] for start, stop in self.local_ranges]

    @property
    def buckets(self) -> list[Tensor]:
        return [self.flat[start:stop] for start, stop in self.layout.bounds]


GATHER_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Dtypes of gathered weights by their names in a run document."""


class FlatWeights:
    """Weights of one rank.

    `model_weights` holds every weight as the model uses it, bit-identical on all ranks. `masters` are the fp32 weights
    that this rank steps: the same memory, or, if weights are gathered in bf16, only the elements of this rank.

    Args:
        sharded_all_reduce: gathers the shards; None if the optimizer step is not sharded.
        cast: changes the dtype of some parameters; called once their fp32 values are stored.
    """

    def __init__(
        self,
        buffer: GradientBuffer,
        sharded_all_reduce: ShardedAllReduce | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        cast: Callable[[], None] = lambda: None,
    ) -> None:
        """Take over the values of the model's parameters."""
        dtype = torch.float32 if sharded_all_reduce is None else dtype
        self._buffer, self._sharded_all_reduce = buffer, sharded_all_reduce
        initial = torch.zeros_like(buffer.flat)
        for name, view in self.named_views(initial).items():
            view.copy_(buffer.parameters[name].detach())
        self.model_weights = initial.to(dtype)
        self.masters = initial if dtype == torch.float32 else self.local(initial)
        cast()
        self._cast_parameters: list[Tensor] = []
        self._cast_sources: list[Tensor] = []
        for name, view in self.named_views(self.model_weights).items():
            parameter = buffer.parameters[name]
            if parameter.dtype == dtype:
                parameter.data = view
            else:
                self._cast_parameters.append(strided_like(parameter.data, view))
                self._cast_sources.append(view)
        self.all_gather()

    @torch.no_grad()
    @waiting_for(OPTIMIZER)
    def all_gather(self) -> None:
        """Update every parameter from the masters after a step. All ranks call it."""
        if self._sharded_all_reduce is not None:
            local_start = 0
            for (start, stop), (low, high) in zip(self._buffer.local_ranges, self._buffer.layout.bounds, strict=False):
                shard = self.model_weights[start:stop]
                if self.masters.dtype != self.model_weights.dtype:
                    shard.copy_(self.masters[local_start : local_start + stop - start])
                self._sharded_all_reduce.all_gather(shard, self.model_weights[low:high])
                local_start += stop - start
        self._cast()

    def named_views(self, flat: Tensor) -> dict[str, Tensor]:
        """Return views of each parameter in a flat buffer of the layout, by name, in the parameter's shape."""
        buffer = self._buffer
        return {name: view_like(flat, start, buffer.parameters[name]) for name, start in buffer.offsets.items()}

    def local(self, flat: Tensor) -> Tensor:
        """Return this rank's elements of a flat buffer, in the order of `ParamShard`."""
        return torch.cat([flat[start:stop] for start, stop in self._buffer.local_ranges])

    def local_masters(self) -> list[Tensor]:
        """Return the fp32 weights that this rank steps, as views in the order of `local`."""
        if len(self.masters) != len(self._buffer.flat):
            return [self.masters]
        return [self.masters[start:stop] for start, stop in self._buffer.local_ranges]

    @contextmanager
    def swapped(self, flat: Tensor) -> Iterator[None]:
        """Use the fp32 weights `flat` inside the block, then restore the model's own, to the bit.

        All ranks call it with equal values, as returned by `unshard`.
        """
        saved = self.model_weights.clone()
        try:
            self._load_model_weights(flat)
            yield
        finally:
            self._load_model_weights(saved)

    @torch.no_grad()
    def _load_model_weights(self, flat: Tensor) -> None:
        self.model_weights[: len(flat)].copy_(flat)
        self._cast()

    def _cast(self) -> None:
        """Cast the parameters whose dtype is not that of `model_weights`."""
        if self._cast_parameters:
            torch._foreach_copy_(self._cast_parameters, self._cast_sources)

    def unshard(self, local_values: Tensor) -> Tensor:
        """Gather the fp32 `local_values` (see `local`) of a row's ranks into one flat buffer. All ranks call it."""
        if self._sharded_all_reduce is None:
            return local_values
        flat = local_values.new_zeros(self._buffer.layout.length)
        lengths = [stop - start for start, stop in self._buffer.local_ranges]
        for shard, (low, high) in zip(local_values.split(lengths), self._buffer.layout.bounds, strict=False):
            self._sharded_all_reduce.all_gather(shard.contiguous(), flat[low:high])
        return flat

    def unshard_masters(self) -> Tensor:
        """Return all fp32 weights as one flat buffer. All ranks call it."""
        return self.model_weights if self.masters is self.model_weights else self.unshard(self.masters)

    def load_masters(self, flat: Tensor) -> None:
        """Load all fp32 weights from a flat buffer, the same on every rank."""
        self.masters.copy_(flat if len(self.masters) == len(flat) else self.local(flat))
        self.all_gather()


def view_like(flat: Tensor, start: int, like: Tensor) -> Tensor:
    """Return the elements of `flat` from `start` as a view with the shape and memory order of `like`."""
    part = flat[start : start + like.numel()]
    if like.dim() == 4 and like.is_contiguous(memory_format=torch.channels_last) and not like.is_contiguous():
        outputs, inputs, height, width = like.shape
        return part.view(outputs, height, width, inputs).permute(0, 3, 1, 2)
    return part.view(like.shape)


def strided_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a view with the strides of `like` if the strides differ only in dimensions of size 1.

    A 1x1 filter in NHWC order has other strides than its view there. One such pair makes torch._foreach_copy_ copy the
    list tensor by tensor.
    """
    dims = zip(tensor.shape, tensor.stride(), like.stride(), strict=True)
    if tensor.stride() == like.stride() or any(size > 1 and a != b for size, a, b in dims):
        return tensor
    return tensor.as_strided(like.shape, like.stride())


def _shard_ranges(bounds: tuple[tuple[int, int], ...], shards: int, shard: int) -> Iterator[tuple[int, int]]:
    for start, stop in bounds:
        length = (stop - start) // shards
        yield start + shard * length, start + (shard + 1) * length
