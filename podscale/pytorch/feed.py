"""Batches of uint8 from a loader to the device."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from podscale.data.loaders.base import Batch
from podscale.pytorch.world import World
from podscale.training.training_logger import PhaseTimer


@dataclass(frozen=True)
class DeviceBatch:
    """images: uint8 [n, height, width, 3]. labels: int64 [n]. Both on the device; the batch as read."""

    images: Tensor
    labels: Tensor
    host_batch: Batch


class DevicePrefetcher:
    """Moves uint8, a quarter of the bytes of fp32; the update normalises (see normalise).

    On a GPU the copy runs on a side stream. The host is ahead of the device there, so the next batch is copied while
    the current one is still being used.
    """

    def __init__(self, world: World) -> None:
        self._device = world.device
        self._stream = torch.cuda.Stream(world.device) if world.on_gpu else None

    def __call__(self, batches: Iterator[Batch], phase: PhaseTimer) -> Iterator[DeviceBatch]:
        """The same batches on the device, in order; phases data_wait and h2d are measured."""
        while True:
            with phase("data_wait"):
                batch = next(batches, None)
            if batch is None:
                return
            with phase("h2d"):
                moved = self._move(batch)
            yield moved

    def _move(self, batch: Batch) -> DeviceBatch:
        """Copies on the side stream, orders the current one after it and keeps the memory until that is done with."""
        if self._stream is None:
            return self._to_device(batch)
        current = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            moved = self._to_device(batch)
        current.wait_stream(self._stream)
        for tensor in (moved.images, moved.labels):
            tensor.record_stream(current)
        return moved

    def _to_device(self, batch: Batch) -> DeviceBatch:
        images = batch.images if isinstance(batch.images, Tensor) else self._copy(torch.from_numpy(batch.images))
        return DeviceBatch(images, self._copy(torch.from_numpy(batch.labels)), batch)

    def _copy(self, values: Tensor) -> Tensor:
        """Pinned memory comes from torch's cache, which keeps it until the copy is over."""
        if self._stream is None:
            return values
        return values.pin_memory().to(self._device, non_blocking=True)
