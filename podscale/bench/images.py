"""Images of the benchmarks: any images without their labels, and a synthetic shard set without images.

`podscale bench input` packs the first kind. `podscale bench train` reads the second: an index like ImageNet's, for
everything but decoding.
"""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import numpy as np

from podscale.data import index
from podscale.data.manifest import SCHEMA_VERSION, Shard, ShardSetManifest, SplitSummary, classes_sha256
from podscale.data.sources.base import Where, is_image_name
from podscale.data.sources.storage import Storage, open_storage
from podscale.data.sources.tar import is_tar_name, tar_members
from podscale.errors import InputError
from podscale.util.files import write_json

MIN_CLASSES = 2
"""Least number of classes of a shard set."""
WIDTH, HEIGHT = 500, 375
"""Most frequent image size in ImageNet, pixels."""


def copy_without_labels(location: str, target: Path) -> int:
    """Copy the images below a folder, or in a .tar, to class folders in `target`; return their number.

    Labels do not matter to the rate. All images become training images, and the first ones validation images too.
    """
    count = 0
    for count, (name, content) in enumerate(_images(open_storage(location), Where(location)), 1):
        number = count - 1
        splits = ("train", "val") if number < MIN_CLASSES else ("train",)
        for split in splits:
            folder = target / split / f"class-{number % MIN_CLASSES}"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{number:07d}{PurePosixPath(name).suffix}").write_bytes(content)
    if count < MIN_CLASSES:
        raise InputError(
            f"{count or 'no'} images found, and {MIN_CLASSES} or more are needed",
            field="--source",
            got=location,
            hint="Give a folder or an uncompressed .tar of image files, such as .jpg.",
        )
    return count


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
