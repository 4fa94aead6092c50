"""Batches on the device: prefetch from the loader, normalisation, mixup (Zhang 2017) and cutmix (Yun 2019).

Batches travel as uint8 and are normalised inside the step, so that a compiler can fuse it. Mixup and cutmix mix each
image with its counterpart from the end of the batch, by one formula: W x image + (1 - W) x counterpart. W is constant
for mixup; for cutmix it is 0 inside a rectangle and 1 outside. The targets are mixed by the mean of W. The host draws
before each step and copies the draw to the device, so a replayed CUDA graph mixes anew in every step.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from podscale.config import InputSection
from podscale.config.train import MixSection
from podscale.data.loaders.base import Batch
from podscale.data.rng import UInt64Array, derive_key, uniform
from podscale.pytorch.world import World, world_of_one
from podscale.training.step_timer import PhaseTimer, untimed


@dataclass(frozen=True)
class DeviceBatch:
    """Batch on the device: images uint8 [n, height, width, 3], labels int64 [n], and the batch as read."""

    images: Tensor
    labels: Tensor
    host_batch: Batch


class DevicePrefetcher:
    """Prefetcher of batches to the device as uint8, a quarter of fp32's bytes; the step normalises (see `Normalise`).

    On a GPU a side stream copies the next batch while the current one is used.
    """

    def __init__(self, world: World) -> None:
        self._device = world.device
        self._stream = torch.cuda.Stream(world.device) if world.on_gpu else None

    def __call__(self, batches: Iterator[Batch], phase: PhaseTimer) -> Iterator[DeviceBatch]:
        """Yield the batches on the device, in order. Times the phases data_wait and h2d."""
        while True:
            with phase("data_wait"):
                batch = next(batches, None)
            if batch is None:
                return
            with phase("h2d"):
                device_batch = self._move(batch)
            yield device_batch

    def _move(self, batch: Batch) -> DeviceBatch:
        """Copy on the side stream. The current stream waits for it, and the memory is kept until that has used it."""
        if self._stream is None:
            return self._to_device(batch)
        current = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            device_batch = self._to_device(batch)
        current.wait_stream(self._stream)
        for tensor in (device_batch.images, device_batch.labels):
            tensor.record_stream(current)
        return device_batch

    def _to_device(self, batch: Batch) -> DeviceBatch:
        labels = self.copy_to_device(torch.from_numpy(batch.labels))
        if isinstance(batch.images, Tensor):
            return DeviceBatch(batch.images, labels, batch)
        return DeviceBatch(self.copy_to_device(torch.from_numpy(batch.images)), labels, batch)

    def copy_to_device(self, values: Tensor) -> Tensor:
        """Copy `values`, any shape and dtype, on the current stream. The host does not wait.

        The source is pinned memory of torch's cache, which keeps it until the copy is over: `values` itself if it is
        pinned, such as images from a loader (`data.loaders.cpu`), else a copy.
        """
        if self._stream is None:
            return values
        return values.pin_memory().to(self._device, non_blocking=True)


def deliver_batches(batches: Iterator[Batch], device: str) -> Iterator[Batch]:
    """Yield each batch after its copy has been queued and the copy of the batch before has ended.

    `podscale bench input` measures this. A training too runs a step ahead of its device. The host sleeps while it
    waits, so the wait costs no CPU time.
    """
    world = world_of_one(torch.device(device))
    previous: torch.cuda.Event | None = None
    for batch in DevicePrefetcher(world)(batches, untimed):
        if world.on_gpu:
            if previous is not None:
                previous.synchronize()
            previous = torch.cuda.Event(blocking=True)
            previous.record(torch.cuda.current_stream(world.device))
        yield batch.host_batch


class Normalise:
    """Normalisation of uint8 images [n, height, width, 3] to float32 [n, 3, height, width].

    (x / 255 - mean) / std by constants of the data set, or by those of each image (see `standardise`).
    """

    def __init__(self, section: InputSection, world: World, *, channels_last: bool) -> None:
        self._layout = torch.channels_last if channels_last else torch.contiguous_format
        self._per_image = section.per_image_standardization
        scale = 255.0 * torch.tensor(section.std)
        self._factor = (1.0 / scale).view(1, 3, 1, 1).to(world.device)
        self._shift = (-255.0 * torch.tensor(section.mean) / scale).view(1, 3, 1, 1).to(world.device)

    def __call__(self, images: Tensor) -> Tensor:
        assert images.dtype == torch.uint8, images.dtype
        floats = images.permute(0, 3, 1, 2).to(torch.float32, memory_format=self._layout)
        return standardise(floats) if self._per_image else floats.mul_(self._factor).add_(self._shift)


def standardise(images: Tensor) -> Tensor:
    """Return (x - mean) / max(std, 1 / sqrt(N)) of each image, N values, as tf.image.per_image_standardization.

    Args:
        images: float [n, 3, height, width], pixels from 0 to 255.
    """
    variance, mean = torch.var_mean(images, dim=(1, 2, 3), correction=0, keepdim=True)
    return (images - mean) / variance.sqrt().clamp_min(images[0].numel() ** -0.5)


_KEY_DOMAIN = 0x6D6978  # "mix"
_MAX_TRIES = 32  # pairs of draws for one number of Beta; each pair is accepted with probability 0.5 or more


class BatchMixer:
    """Mixup and cutmix of a step's images, by one draw for each step."""

    def __init__(self, section: MixSection, seed: int, world: World) -> None:
        self._section, self._seed, self._rank = section, seed, world.rank
        # is cutmix, weight of the own image, row and column of the rectangle's centre
        self._draw = torch.tensor([0.0, 1.0, 0.0, 0.0], device=world.device)

    def start_step(self, step: int) -> None:
        """Draw for step `step`, from 0. Never call it while a CUDA graph is being recorded."""
        section, key = self._section, derive_key(self._seed, _KEY_DOMAIN, step, self._rank)
        choice, row, column = uniform(derive_key(key, np.arange(3)))
        is_cutmix = section.cutmix > 0 and (section.mixup == 0 or choice < 0.5)
        weight = sample_beta(section.cutmix if is_cutmix else section.mixup, derive_key(key, 3))
        draw = torch.tensor([float(is_cutmix), weight, row, column])
        # From pinned memory, because a copy from other memory makes the host wait for the device.
        self._draw.copy_(draw.pin_memory() if self._draw.is_cuda else draw, non_blocking=True)

    def mix_images(self, images: Tensor) -> Tensor:
        """Return `images`, float [n, channels, height, width], mixed."""
        mask = self._mix_mask(*images.shape[-2:]).to(images.dtype)
        return images * mask + images.flip(0) * (1 - mask)

    def mix_weight(self, height: int, width: int) -> Tensor:
        """Return the weight of an image's own target, a scalar on the device: the mean of W."""
        return self._mix_mask(height, width).mean()

    def _mix_mask(self, height: int, width: int) -> Tensor:
        """Return W [height, width]. The rectangle has the image's shape, clipped at the borders of the image."""
        is_cutmix, weight, *centre = self._draw.unbind()
        half = (1 - weight).sqrt() / 2
        inside = []
        for middle, side in zip(centre, (height, width), strict=True):
            pixels = torch.arange(side, device=weight.device)
            inside.append((pixels >= ((middle - half) * side).floor()) & (pixels < ((middle + half) * side).floor()))
        box = inside[0][:, None] & inside[1][None, :]
        return torch.where(is_cutmix > 0, (~box).float(), weight)


def sample_beta(alpha: float, key: UInt64Array) -> float:
    """Draw from Beta(alpha, alpha), 0 < alpha <= 1, by Joehnk's method (1964), with the random numbers of one key."""
    draws = uniform(derive_key(key, np.arange(2 * _MAX_TRIES))).reshape(_MAX_TRIES, 2) ** (1.0 / alpha)
    total = draws.sum(axis=1)
    accepted = np.flatnonzero((total > 0) & (total <= 1))
    return float(draws[accepted[0], 0] / total[accepted[0]]) if len(accepted) else 0.5
