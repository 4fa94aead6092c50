"""From uint8 batches to images on the device, and to normalised ones."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from podscale.config import InputSection
from podscale.data.loaders.base import Batch
from podscale.pytorch.device_prefetcher import DevicePrefetcher, Normalise
from podscale.pytorch.world import World

ALONE = World(0, 1, 0, 1, torch.device("cpu"))


def batch(step: int) -> Batch:
    images = np.random.default_rng(step).integers(0, 256, (4, 5, 6, 3), dtype=np.uint8)
    return Batch(images, np.arange(4), np.arange(4, dtype=np.uint64), np.ones(4, np.float32), step)


@pytest.mark.parametrize("channels_last", [True, False])
def test_images_are_normalised_in_the_order_given(channels_last: bool) -> None:
    section = InputSection(mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))
    phases: list[str] = []

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        phases.append(name)
        yield

    normalise = Normalise(section, ALONE, channels_last=channels_last)
    found = list(DevicePrefetcher(ALONE)(iter([batch(7), batch(8)]), phase))
    assert [item.host_batch.step for item in found] == [7, 8]
    for item in found:
        want = (item.host_batch.images / 255.0 - section.mean) / section.std
        images = normalise(item.images)
        np.testing.assert_allclose(images.permute(0, 2, 3, 1).numpy(), want, atol=1e-6)
        assert images.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
        assert images.dtype == torch.float32
        assert item.images.dtype == torch.uint8
    assert phases == ["data_wait", "h2d", "data_wait", "h2d", "data_wait"]


def test_a_loaders_own_tensors_are_not_changed() -> None:
    source = batch(0)
    images = torch.from_numpy(source.images)
    before = images.clone()
    given = Batch(images, source.labels, source.keys, source.weights, 0)
    section = InputSection()

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        yield

    (found,) = DevicePrefetcher(ALONE)(iter([given]), phase)
    assert Normalise(section, ALONE, channels_last=True)(found.images).shape == (4, 3, 5, 6)
    assert torch.equal(images, before)
