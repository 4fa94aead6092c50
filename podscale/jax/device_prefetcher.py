"""Batches on the devices of this process, several at once if a call runs several steps; normalisation."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from math import prod
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from podscale.config import InputSection
from podscale.data.loaders.base import Batch
from podscale.jax.mesh import RANKS, SPATIAL, assemble_array, axis_size
from podscale.jax.spatial import Parts
from podscale.training.step_timer import PhaseTimer


class GlobalBatches(NamedTuple):
    """Global batches of k steps: images uint8 [k, n, height, width, 3], labels int32 [k, n].

    Each rank of the mesh takes an equal part of the n images, in order.
    """

    images: Array
    labels: Array


BATCH_SPECS: Any = GlobalBatches(PartitionSpec(None, RANKS, *SPATIAL), PartitionSpec(None, RANKS))  # type: ignore[arg-type]
"""Sharding of global batches: devices that share images each have a tile of them, and all of their labels."""


@dataclass(frozen=True)
class DeviceBatches:
    """Batches on the devices, `DevicePrefetcher.length` of them, filled up with zeros."""

    device_batches: GlobalBatches
    host_batches: tuple[Batch, ...]

    @property
    def images(self) -> int:
        """Number of images of this process in these batches."""
        return sum(len(batch.labels) for batch in self.host_batches)


class DevicePrefetcher:
    """Prefetcher of batches to the devices as uint8, a quarter of fp32's bytes; the step normalises (see `normalise`).

    Calling a program only dispatches it. So the next batches are read and copied while the devices compute.
    """

    def __init__(self, mesh: Mesh, length: int = 1, specs: GlobalBatches = BATCH_SPECS) -> None:
        """Prepare for programs that take `length` batches, used or not."""
        self._specs = specs
        self._mesh, self._ranks, self.length = mesh, axis_size(mesh, RANKS), length
        slices: dict[Any, Any] = dict(
            NamedSharding(mesh, PartitionSpec(RANKS)).addressable_devices_indices_map((self._ranks,))
        )
        self.local_ranks = len({index[0].start for index in slices.values()})
        """Number of mesh ranks of this process's devices."""

    def __call__(
        self, batches: Iterator[Batch], phase: PhaseTimer, count: Callable[[], int] = lambda: 1
    ) -> Iterator[DeviceBatches]:
        """Yield the batches on the devices, in order; time the phases data_wait and h2d.

        `count` returns the number of batches of the next call. It is called before they are read.
        """
        while True:
            with phase("data_wait"):
                host_batches = tuple(islice(batches, count()))
            if not host_batches:
                return
            with phase("h2d"):
                device_batches = DeviceBatches(self._move(host_batches), host_batches)
            yield device_batches

    def _move(self, batches: tuple[Batch, ...]) -> GlobalBatches:
        assert len(batches) <= self.length, f"{len(batches)} batches for a program of {self.length}"
        total = len(batches[0].labels) // self.local_ranks * self._ranks

        def put(parts: list[npt.NDArray[Any]], spec: Any) -> Array:
            return assemble_array(self._stack(parts), NamedSharding(self._mesh, spec), dim=1, length=total)

        labels = [batch.labels.astype(np.int32) for batch in batches]
        return GlobalBatches(
            put([batch.images for batch in batches], self._specs.images), put(labels, self._specs.labels)
        )

    def _stack(self, parts: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
        """Stack the arrays of each batch to [length, ...], filled up with zeros. A single batch is not copied."""
        if self.length == 1:
            return parts[0][None]
        stack = np.zeros((self.length, *parts[0].shape), parts[0].dtype)
        for row, part in zip(stack, parts, strict=False):
            row[...] = part
        return stack


def normalise(images: Array, section: InputSection, parts: Parts = (1, 1)) -> Array:
    """Normalise `images`, uint8 [n, height, width, 3], to float32 of the same shape.

    (x / 255 - mean) / std by constants of the data set, or by those of each image (see `standardise`). If `parts` is
    not (1, 1), `images` are this device's tiles.
    """
    assert images.dtype == jnp.uint8, images.dtype
    if section.per_image_standardization:
        return standardise(images.astype(jnp.float32), parts)
    scale = 255.0 * np.array(section.std)
    factor, shift = 1.0 / scale, -255.0 * np.array(section.mean) / scale
    return images.astype(jnp.float32) * factor.astype(np.float32) + shift.astype(np.float32)


def standardise(images: Array, parts: Parts) -> Array:
    """Return (x - mean) / max(std, 1 / sqrt(N)) of each image, N values, as tf.image.per_image_standardization.

    Args:
        images: float [n, height, width, 3], pixels from 0 to 255.
    """
    values = prod(images.shape[1:]) * prod(parts)

    def image_mean(x: Array) -> Array:
        mean = x.mean((1, 2, 3), keepdims=True)
        return mean if parts == (1, 1) else lax.pmean(mean, SPATIAL)  # input tiles are even

    centred = images - image_mean(images)
    return centred / jnp.maximum(jnp.sqrt(image_mean(centred * centred)), values**-0.5)


LOADER_DEVICE = "cpu"
"""Device on which loaders decode: batches reach the accelerators as pixels."""
