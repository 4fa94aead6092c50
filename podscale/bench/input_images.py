"""Images for `podscale bench input`: any folder or archive of images, packed into a temporary shard set."""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from podscale.data.sources.base import Where, is_image_name
from podscale.data.sources.storage import Storage, open_storage
from podscale.data.sources.tar import is_tar_name, tar_members
from podscale.errors import InputError

CLASSES = 2
"""Least number of classes of a shard set."""


def copy_without_labels(location: str, target: Path) -> int:
    """Copy the images below a folder, or in a .tar, to class folders in `target`; return their number.

    Labels do not matter to the rate. All images become training images, and the first ones validation images too.
    """
    count = 0
    for count, (name, content) in enumerate(_images(open_storage(location), Where(location)), 1):
        number = count - 1
        splits = ("train", "val") if number < CLASSES else ("train",)
        for split in splits:
            folder = target / split / f"class-{number % CLASSES}"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{number:07d}{PurePosixPath(name).suffix}").write_bytes(content)
    if count < CLASSES:
        raise InputError(
            f"{count or 'no'} images found, and {CLASSES} or more are needed",
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
