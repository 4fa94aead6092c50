"""The fp32 weights that an update works on, and how the model's parameters follow them.

The weights lie in the flat layout of the gradients. Where the whole update is carried out on every rank, parameters in
fp32 are views of the weights, and there is nothing to bring up to date. Where the update is sharded (Kumar 2019; Xu
2020), each rank updates its shard of every bucket, and the ranks of a row then gather the others' shards: weights
travel instead of gradients, in fp32, or rounded to bf16 at half the volume. Then, and for parameters in half precision,
the fp32 masters are kept beside the parameters, and those are rounded from them after every update.

Tensors as views of a flat buffer (see `podscale.training.param_layout`), in the memory order of the model's parameters.

Gradients in one flat fp32 buffer of fixed layout: what a reducer fills and an update works on.

Beside the gradients the buffer has room for `extra` values that every rank wants averaged, at no further message: the
loss and the running statistics of batch norm.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from podscale.distributed.waits import OPTIMIZER, waiting_for
from podscale.pytorch.all_reduce import ShardedAllReduce
from podscale.training.param_layout import ALIGNMENT_ELEMENTS, plan_buckets


def view_like(flat: Tensor, start: int, like: Tensor) -> Tensor:
    """The elements of `flat` from `start` in the shape of `like` and, for channels-last filters, its memory order."""
    part = flat[start : start + like.numel()]
    if like.dim() == 4 and like.is_contiguous(memory_format=torch.channels_last) and not like.is_contiguous():
        outputs, inputs, height, width = like.shape
        return part.view(outputs, height, width, inputs).permute(0, 3, 1, 2)
    return part.view(like.shape)


def strided_like(tensor: Tensor, like: Tensor) -> Tensor:
    """The same elements with the strides of `like`, where the two differ in dimensions of size 1 alone.

    A 1x1 filter in NHWC order has other strides there than its view, and one such pair in a list makes torch copy all
    of the list one by one.
    """
    if tensor.stride() == like.stride():
        return tensor
    pairs = zip(tensor.shape, tensor.stride(), like.stride(), strict=True)
    if all(size == 1 or mine == other for size, mine, other in pairs):
        return tensor.as_strided(like.shape, like.stride())
    return tensor


class GradientBuffer:
    """The buffer, and which part of it holds averages on this rank.

    Of `shards` parts of every bucket, part `shard` belongs to this rank; with one shard the whole buffer does. Where
    there are several, `extra` has a bucket of its own, which all ranks hold whole.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        *,
        bucket_elements: int,
        multiple: int = 1,
        extra: int = 1,
        shards: int = 1,
        shard: int = 0,
    ) -> None:
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        # Backward reaches the last layers first, so the layout runs backwards; `extra` is needed last.
        backwards = list(reversed(self.parameters.values()))
        if shards > 1:
            multiple *= ALIGNMENT_ELEMENTS  # so that every shard begins where kernels can read whole vectors
        self.layout = plan_buckets(
            [p.numel() for p in backwards] + [extra], bucket_elements, multiple, isolate_last=shards > 1
        )
        *starts, extra_start = self.layout.starts
        self.offsets = dict(zip(self.parameters, reversed(starts), strict=True))
        """Where each parameter begins."""
        self.flat = torch.zeros(self.layout.length, dtype=torch.float32, device=device)
        self.views = [view_like(self.flat, self.offsets[name], p) for name, p in self.parameters.items()]
        """The gradient of each parameter, in the order of the model's parameters."""
        self.extra_values = self.flat[extra_start : extra_start + extra]
        self.local_ranges = (
            [(0, extra_start)] if shards == 1 else [*_shard_ranges(self.layout.bounds[:-1], shards, shard)]
        )
        """Where the averaged gradients of this rank are."""
        self.averages = [self.flat[start:stop] for start, stop in self.local_ranges]

    @property
    def buckets(self) -> list[Tensor]:
        return [self.flat[start:stop] for start, stop in self.layout.bounds]


def _shard_ranges(bounds: tuple[tuple[int, int], ...], shards: int, shard: int) -> Iterator[tuple[int, int]]:
    for start, stop in bounds:
        length = (stop - start) // shards
        yield start + shard * length, start + (shard + 1) * length


GATHER_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Formats in which weights are gathered, by their names in a run document."""


class FlatWeights:
    """The weights of one rank.

    `published` holds every weight as the model sees it, equal on all ranks to the bit; `masters` are the fp32 weights
    that this rank updates: the same memory, or where weights are published in bf16, this rank's own elements alone.
    sharded_all_reduce: what collects shards; None where the update is not sharded.
    """

    def __init__(
        self,
        buffer: GradientBuffer,
        sharded_all_reduce: ShardedAllReduce | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        cast: Callable[[], None] = lambda: None,
    ) -> None:
        """Takes over the values of the model's parameters, which are fp32 until `cast` changes the dtype of some."""
        dtype = torch.float32 if sharded_all_reduce is None else dtype
        self._buffer, self._sharded_all_reduce = buffer, sharded_all_reduce
        first = torch.zeros_like(buffer.flat)
        for name, value in self.named_views(first).items():
            value.copy_(buffer.parameters[name].detach())
        self.model_weights = first.to(dtype)
        self.masters = first if dtype == torch.float32 else self.local(first)
        cast()
        views = self.named_views(self.model_weights)
        for name, parameter in buffer.parameters.items():
            if parameter.dtype == dtype:
                parameter.data = views[name]
        followers = {name: p for name, p in buffer.parameters.items() if p.dtype != dtype}
        self._cast_parameters = [strided_like(parameter.data, views[name]) for name, parameter in followers.items()]
        self._cast_sources = [views[name] for name in followers]
        self.all_gather()

    @torch.no_grad()
    @waiting_for(OPTIMIZER)
    def all_gather(self) -> None:
        """Brings every parameter of every rank up to date after an update; all ranks call it."""
        if self._sharded_all_reduce is not None:
            own = 0
            for (start, stop), (low, high) in zip(self._buffer.local_ranges, self._buffer.layout.bounds, strict=False):
                shard = self.model_weights[start:stop]
                if self.masters.dtype != self.model_weights.dtype:
                    shard.copy_(self.masters[own : own + stop - start])
                self._sharded_all_reduce.all_gather(shard, self.model_weights[low:high])
                own += stop - start
        if self._cast_parameters:
            torch._foreach_copy_(self._cast_parameters, self._cast_sources)

    def named_views(self, flat: Tensor) -> dict[str, Tensor]:
        """The elements of each parameter in a flat buffer of the layout, in the parameter's shape."""
        buffer = self._buffer
        return {name: view_like(flat, start, buffer.parameters[name]) for name, start in buffer.offsets.items()}

    def local(self, flat: Tensor) -> Tensor:
        """This rank's elements of a flat buffer, as `Share` orders them."""
        return torch.cat([flat[start:stop] for start, stop in self._buffer.local_ranges])

    def local_masters(self) -> list[Tensor]:
        """The fp32 weights that this rank updates, as views in the order of `own`."""
        if len(self.masters) != len(self._buffer.flat):
            return [self.masters]
        return [self.masters[start:stop] for start, stop in self._buffer.local_ranges]

    @contextmanager
    def swapped(self, flat: Tensor) -> Iterator[None]:
        """The model with these weights in place of its own; all ranks call it with the same ones.

        flat: fp32, as `whole` returns it. Afterwards the parameters are what they were, to the bit.
        """
        kept = self.model_weights.clone()
        try:
            self._load_model_weights(flat)
            yield
        finally:
            self._load_model_weights(kept)

    @torch.no_grad()
    def _load_model_weights(self, flat: Tensor) -> None:
        self.model_weights[: len(flat)].copy_(flat)
        if self._cast_parameters:
            torch._foreach_copy_(self._cast_parameters, self._cast_sources)

    def unshard(self, local_values: Tensor) -> Tensor:
        """A buffer to take `named` parts from, of which every rank of a row brings its own; all ranks call it."""
        if self._sharded_all_reduce is None:
            return local_values
        flat = local_values.new_zeros(self._buffer.layout.length)
        lengths = [stop - start for start, stop in self._buffer.local_ranges]
        for shard, (low, high) in zip(local_values.split(lengths), self._buffer.layout.bounds, strict=False):
            self._sharded_all_reduce.all_gather(shard.contiguous(), flat[low:high])
        return flat

    def unshard_masters(self) -> Tensor:
        """All fp32 weights as one flat buffer; all ranks call it."""
        return self.model_weights if self.masters is self.model_weights else self.unshard(self.masters)

    def load_masters(self, flat: Tensor) -> None:
        """Takes over all fp32 weights, the same on every rank."""
        self.masters.copy_(flat if len(self.masters) == len(flat) else self.local(flat))
        self.all_gather()
