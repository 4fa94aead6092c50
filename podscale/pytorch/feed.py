"""Batches of uint8 from a loader to normalised images on the device."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from podscale.config import InputSection
from podscale.input.batch import Batch
from podscale.pytorch.world import World

Phase = Callable[[str], AbstractContextManager[None]]
"""Measures one phase of a step by name."""


@dataclass(frozen=True)
class DeviceBatch:
    """images: float32 [n, 3, height, width], normalised. labels: int64 [n]. Both on the device; the batch as read."""

    images: Tensor
    labels: Tensor
    source: Batch


class Feed:
    """Moves uint8 (a quarter of the bytes of fp32) and normalises there.

    On a GPU the copy runs on a side stream. The host is ahead of the device there, so the next batch is copied while
    the current one is still being used.
    """

    def __init__(self, section: InputSection, world: World, *, channels_last: bool) -> None:
        self._device = world.device
        self._layout = torch.channels_last if channels_last else torch.contiguous_format
        scale = 255.0 * torch.tensor(section.std)
        self._factor = (1.0 / scale).view(1, 3, 1, 1).to(world.device)
        self._shift = (-255.0 * torch.tensor(section.mean) / scale).view(1, 3, 1, 1).to(world.device)
        self._stream = torch.cuda.Stream(world.device) if world.on_gpu else None

    def __call__(self, batches: Iterator[Batch], phase: Phase) -> Iterator[DeviceBatch]:
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
        if isinstance(batch.images, Tensor):  # a loader that decodes on the device made them in the current stream
            self._stream.wait_stream(current)
            batch.images.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            moved = self._to_device(batch)
        current.wait_stream(self._stream)
        for tensor in (moved.images, moved.labels):
            tensor.record_stream(current)
        return moved

    def _to_device(self, batch: Batch) -> DeviceBatch:
        images = batch.images if isinstance(batch.images, Tensor) else self._copy(torch.from_numpy(batch.images))
        assert images.dtype == torch.uint8, images.dtype
        images = images.permute(0, 3, 1, 2).to(torch.float32, memory_format=self._layout)
        images.mul_(self._factor).add_(self._shift)
        return DeviceBatch(images, self._copy(torch.from_numpy(batch.labels)), batch)

    def _copy(self, values: Tensor) -> Tensor:
        if self._stream is None:
            return values
        return values.pin_memory().to(self._device, non_blocking=True)
