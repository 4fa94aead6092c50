"""Synthetic shard set: an index like ImageNet's without image bytes, for benchmarks of everything but decoding."""

from pathlib import Path

import numpy as np

from podscale.data import index
from podscale.data.manifest import SCHEMA_VERSION, Shard, ShardSetManifest, SplitSummary, classes_sha256
from podscale.util.files import write_json

WIDTH, HEIGHT = 500, 375
"""Most frequent image size in ImageNet, pixels."""


def write_synthetic_shard_set(directory: Path, *, images: int, classes: int = 1000) -> Path:
    """Write the index of `images` training images, and one validation image for each class, without records.

    Only the synthetic loader can use it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    names = [f"class-{number:04d}" for number in range(classes)]
    write_json(directory / "classes.json", names)
    splits = {
        "train": _write_split(directory / "train", images, classes, first_key=0),
        "validation": _write_split(directory / "validation", classes, classes, first_key=images),
    }
    ShardSetManifest(SCHEMA_VERSION, "imaginary", "imaginary", {}, classes_sha256(names), splits).write(directory)
    return directory


def _write_split(directory: Path, images: int, classes: int, *, first_key: int) -> SplitSummary:
    directory.mkdir(parents=True, exist_ok=True)
    labels = np.arange(images) % classes
    zeros = np.zeros(images, dtype=np.int64)
    index.write_index(
        directory / "index",
        {
            "key": np.arange(first_key, first_key + images),
            "offset": zeros,
            "size": zeros,
            "shard": zeros,
            "label": labels,
            "height": zeros + HEIGHT,
            "width": zeros + WIDTH,
            "format": zeros + index.JPEG,
            "flags": zeros,
        },
    )
    counts = tuple(np.bincount(labels, minlength=classes).tolist())
    return SplitSummary(images, 0, counts, "", (Shard("shard-00000-of-00001.tar", images, 0, ""),))
