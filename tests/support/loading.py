"""Helpers for loader tests: batches of a shard set, and images of every kind that loaders decode."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from podscale.config.run_config import RunConfig
from podscale.data import native
from podscale.data.decode_index import write_decode_index
from podscale.data.index import JPEG
from podscale.data.loaders.base import Loader
from podscale.data.loaders.build_loader import (
    build_evaluation_loader,
    build_loader,
    is_dali_installed,
    open_shard_set,
)
from podscale.data.sampler import build_sampler, evaluation_steps
from podscale.data.shard_set import ShardSet, Split
from podscale.training.schedules import image_phases
from tests.support.shard_set import encode_image, smooth_pixels

needs_native = pytest.mark.skipif(not native.is_installed(), reason="the native extension is not installed")
ON_CPU = "native" if native.is_installed() else "reference"
"""Loader that `auto` takes on CPUs."""
NATIVE = pytest.param("native", marks=needs_native)
needs_dali = pytest.mark.skipif(not is_dali_installed(), reason="DALI is not installed (Linux x86-64 only)")
ANY_SIZE = 10**6
"""Percent that no decode index has."""
loaders = pytest.mark.parametrize("loader", ["reference", NATIVE, pytest.param("dali", marks=needs_dali), "nvjpeg"])


def document(loader: str = "reference", batch: int = 8, size: int = 32, **sections: Any) -> RunConfig:
    sections.setdefault("input", {})
    sections["input"] = {"loader": loader, "image_size": size, "workers": 2, **sections["input"]}
    return RunConfig.model_validate(
        {"train": {"global_batch": batch}, "evaluate": {"batch": 6}, "run": {"seed": 4}, **sections}
    )


@contextmanager
def open_loader(
    config: RunConfig, split: Split, *, ranks: range = range(1), world: int = 1, device: str = "cpu"
) -> Iterator[Loader]:
    """Yield a training loader of these ranks; it is closed twice."""
    loader = build_loader(
        config,
        split,
        build_sampler(config, split),
        phases=image_phases(config, len(split)),
        ranks=ranks,
        world_size=world,
        device=device,
    )
    try:
        yield loader
    finally:
        loader.close()
        loader.close()


def train(
    config: RunConfig, directory: Path, start: int, stop: int, *, ranks: range = range(1), world: int = 1
) -> list[Any]:
    return train_and_close(config, directory, start, stop, ranks=ranks, world=world)[0]


def train_and_close(
    config: RunConfig, directory: Path, start: int, stop: int, *, ranks: range = range(1), world: int = 1
) -> tuple[list[Any], Any]:
    """Return the batches, and the closed loader."""
    split = open_shard_set(str(directory), config).split("train")
    with open_loader(config, split, ranks=ranks, world=world) as loader:
        return list(loader.batches(start, stop)), loader


def assert_same_batches(left: list[Any], right: list[Any]) -> None:
    """Check that samples and pixels are the same to the bit."""
    for one, other in zip(left, right, strict=True):
        assert one.step == other.step
        for name in ("keys", "labels", "weights", "images"):
            assert np.array_equal(getattr(one, name), getattr(other, name)), (one.step, name)


def evaluate(config: RunConfig, directory: Path, *, world: int = 1, held: int = 1) -> list[Any]:
    """Return the evaluation batches of all processes, each with this many ranks."""
    split = ShardSet.open(directory).split("validation")
    batches: list[Any] = []
    for first in range(0, world, held):
        ranks = range(first, first + held)
        loader = build_evaluation_loader(config, split, ranks=ranks, world_size=world, device="cpu")
        batches += loader.batches(0, evaluation_steps(len(split), world, config.evaluate.batch))
        loader.close()
    return batches


def add_indexes(directory: Path, interval: int = 2, *, damage: bool = False) -> int:
    """Write the indexes of a set, with a damaged entry in each if asked for. Returns the number of images with one."""
    shard_set, count = ShardSet.open(directory), 0
    for name, summary in shard_set.manifest.splits.items():
        split = shard_set.split(name)
        for number, shard in enumerate(summary.shards):
            rows = np.flatnonzero(split.column("shard") == number)
            images = [
                native.build_decode_index(split.read(row), interval, max_percent=ANY_SIZE)
                if split.column("format")[row] == JPEG
                else b""
                for row in rows.tolist()
            ]
            count += sum(map(bool, images))
            if damage:
                images = [image[:-1] + bytes([image[-1] ^ 1]) if image else image for image in images]
            write_decode_index(split.directory / shard.name, shard.sha256, interval, images)
    return count


def by_key(batches: list[Any]) -> dict[tuple[int, int], np.ndarray]:
    """Map (key, number of its earlier occurrences in these batches) to the image."""
    images: dict[tuple[int, int], np.ndarray] = {}
    for batch in batches:
        for key, weight, image in zip(batch.keys.tolist(), batch.weights, batch.images, strict=True):
            if weight:
                images[key, sum(k == key for k, _ in images)] = np.asarray(image)
    return images


def special_images() -> dict[str, bytes]:
    rgb = smooth_pixels(1, 50, 60)
    exif = Image.Exif()
    exif[0x0112] = 6
    palette = io.BytesIO()
    Image.fromarray(rgb).quantize(64).save(palette, "PNG")
    return {
        "4:4:4": encode_image(rgb, quality=95, subsampling=0),
        "4:2:2": encode_image(rgb, quality=95, subsampling=1),
        "4:2:0": encode_image(rgb, quality=75, subsampling=2),
        "progressive": encode_image(rgb, progressive=True),
        "gray": encode_image(smooth_pixels(2, 40, 33, 1)),
        "cmyk": encode_image(smooth_pixels(3, 40, 50, 4)),
        "rotated by EXIF": encode_image(rgb, exif=exif),
        "png": encode_image(rgb, kind="PNG"),
        "gray png": encode_image(smooth_pixels(2, 40, 33, 1), kind="PNG"),
        "rgba png": encode_image(smooth_pixels(5, 40, 33, 4), kind="PNG"),
        "palette png": palette.getvalue(),
        "odd size": encode_image(smooth_pixels(6, 37, 41)),
        "one pixel": encode_image(smooth_pixels(7, 1, 1)),
    }


def pil_pixels(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
