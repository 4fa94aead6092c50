"""Synthetic loader: random images that stay on the device, with the sample order and batch shapes of a run."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from podscale.data.batch_plan import BatchPlan
from podscale.data.loaders.base import Batch
from podscale.data.rng import derive_key

_KEY_DOMAIN = 0x73796E7468  # "synth"


class SyntheticLoader:
    """Loader with the same random pixels in every batch of one size; the label of a sample is a hash of its key."""

    bad_records = 0
    queued_batches = None
    native_refusals: ClassVar[Mapping[str, int]] = {}
    cached_bytes: ClassVar[Mapping[str, int]] = {}

    def __init__(self, batch_plan: BatchPlan, *, classes: int, seed: int, device: str) -> None:
        self._batch_plan, self._classes, self._seed, self._device = batch_plan, classes, seed, device
        self._images: Any = None

    def batches(self, start: int, stop: int) -> Iterator[Batch]:
        for step in range(start, stop):
            request = self._batch_plan.request_at(step)
            batch = self._batch_plan.make_batch(
                request, self._pixels(len(request.rows), self._batch_plan.image_size_at(step))
            )
            labels = (derive_key(self._seed, _KEY_DOMAIN, batch.keys) % np.uint64(self._classes)).astype(np.int64)
            yield replace(batch, labels=labels)

    def close(self) -> None:
        self._images = None

    def _pixels(self, length: int, size: int) -> Any:
        if self._images is None or self._images.shape[:2] != (length, size):
            generator = np.random.Generator(np.random.Philox(self._seed))
            self._images = generator.integers(0, 256, (length, size, size, 3), dtype=np.uint8)
            if self._device != "cpu":
                import torch  # only if the pixels are on a device

                self._images = torch.from_numpy(self._images).to(self._device)
        return self._images
