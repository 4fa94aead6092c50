"""Fixtures of the loader tests."""

from pathlib import Path

import pytest

from tests.support.loading import special_images
from tests.support.shard_set import Sample, encode_image, image_size, smooth_pixels, varied_samples


@pytest.fixture
def mixed(make_shard_set) -> Path:
    """Make a set of 48 training images of every kind, some tall, three damaged, in 4 shards."""
    samples = [
        Sample(encode_image(smooth_pixels(i, 120 + i, 60), quality=90), i % 4) if i % 3 == 0 else sample
        for i, sample in enumerate(varied_samples(48, 4))
    ]
    for row, data in zip(range(2, 48, 3), special_images().values(), strict=False):
        samples[row] = Sample(data, 1)
    for row, broken in ((6, samples[6].image[:900]), (7, b"nothing"), (30, b"\xff\xd8" + bytes(500))):
        samples[row] = Sample(broken, samples[row].label, image_size(samples[row].image))
    return make_shard_set({"train": samples, "validation": samples[:25]}, shards=4)
