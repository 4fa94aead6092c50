"""Gradients in one flat fp32 buffer of fixed layout: what a reducer fills and an update works on.

Beside the gradients the buffer has room for `extra` values that every rank wants averaged, at no further message: the
loss and the running statistics of batch norm.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from podscale.pytorch.layout import view_like
from podscale.training.param_layout import ALIGNMENT_ELEMENTS, plan_buckets


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
