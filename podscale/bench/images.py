"""Images of the benchmarks: any images without their labels, and a synthetic shard set without images.

`podscale bench input` packs the first kind. `podscale bench train` reads the second: an index like ImageNet's, for
everything but decoding.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePosixPath

import numpy as np

from podscale.config.data import DataSection
from podscale.data import index
from podscale.data.manifest import SCHEMA_VERSION, Shard, ShardSetManifest, SplitSummary, classes_sha256
from podscale.data.shard_set import ShardSet
from podscale.data.sharding.build_shard_set import build_shard_set
from podscale.data.sources import open_source
from podscale.data.sources.base import TRAIN, Where, is_image_name
from podscale.data.sources.storage import Storage, open_storage
from podscale.data.sources.tar import is_tar_name, tar_members
from podscale.errors import InputError
from podscale.util.files import write_json
from podscale.util.progress_reports import ProgressCallback, ignore_progress

MIN_CLASSES = 2
"""Least number of classes of a shard set."""
WIDTH, HEIGHT = 500, 375
"""Most frequent image size in ImageNet, pixels."""


@dataclass(frozen=True)
class CopiedImages:
    """Images that were copied, and the number of training images in their source; None if they were not all counted."""

    count: int
    training_images: int | None


def copy_without_labels(location: str, target: Path, limit: int | None = None) -> CopiedImages:
    """Copy the images below a folder, or in a .tar, to class folders in `target`; at most the first `limit`."""
    images = _images(open_storage(location), Where(location))
    count = write_class_folders(islice(images, limit), target)
    if count < MIN_CLASSES:
        hint = "Give a folder or an uncompressed .tar of image files, such as .jpg."
        raise _too_few(count, "--source", location, hint)
    return CopiedImages(count, count if count != limit else None)


def copy_from_source(data: DataSection, target: Path, limit: int | None = None) -> CopiedImages:
    """Copy training images of a data section, evenly spaced in its source, to class folders in `target`."""
    source = open_source(data)
    items = [item for item in source.items() if data.only_classes is None or item.label in data.only_classes]
    if any(item.split for item in items):
        items = [item for item in items if item.split == TRAIN]
        held_out = data.holdout_fraction or 0.0
    else:
        held_out = data.holdout_fraction or data.validation_fraction
    most = len(items) if limit is None else min(limit, len(items))
    chosen = (items[number * len(items) // most] for number in range(most))
    count = write_class_folders(((item.name.decode("utf-8", "replace"), source.read(item)) for item in chosen), target)
    if count < MIN_CLASSES:
        raise _too_few(count, "data.source", data.source, "Name a source with more training images.")
    per_class = Counter(item.label for item in items)
    most = data.images_per_class or len(items)
    return CopiedImages(count, round(sum(min(number, most) for number in per_class.values()) * (1 - held_out)))


def _too_few(count: int, field: str, location: str, hint: str) -> InputError:
    problem = f"{count or 'no'} images found, and {MIN_CLASSES} or more are needed"
    return InputError(problem, field=field, got=location, hint=hint)


def write_class_folders(images: Iterable[tuple[str, bytes]], target: Path) -> int:
    """Write images, by name and content, to class folders in `target`; return their number.

    Labels do not matter to the rate. All images become training images, and the first ones validation images too.
    """
    count = 0
    for number, (name, content) in enumerate(images):
        splits = ("train", "val") if number < MIN_CLASSES else ("train",)
        for split in splits:
            folder = target / split / f"class-{number % MIN_CLASSES}"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{number:07d}{PurePosixPath(name).suffix}").write_bytes(content)
        count = number + 1
    return count


def pack_class_folders(
    images: Path, directory: Path, data: DataSection, progress: ProgressCallback = ignore_progress
) -> ShardSet:
    """Pack the images that `write_class_folders` wrote, with the options of encoding and size of `data`."""
    kept = ("resize_short", "quality", "decode_index", "shard_bytes", "max_pixels", "max_bytes")
    policy = "convert" if data.policy == "convert" else "quarantine"
    options = {name: getattr(data, name) for name in kept} | {"policy": policy, "max_reject_rate": 1.0}
    section = DataSection(source=str(images), format="imagefolder", **options)
    build_shard_set(section, directory, workers=0, progress=progress)
    return ShardSet.open(directory)


def _images(storage: Storage, where: Where) -> Iterator[tuple[str, bytes]]:
    """Yield the name and the content of each image."""
    for file in storage.files():
        if is_tar_name(file.path or storage.location.encode()):
            with storage.open(file.path) as archive, storage.open(file.path) as content:
                for member in tar_members(archive, where):
                    if is_image_name(member.name):
                        content.seek(member.offset)
                        yield member.name.decode("utf-8", "replace"), content.read(member.size)
        elif is_image_name(file.path):
            yield file.path.decode("utf-8", "replace"), storage.read(file.path)


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
