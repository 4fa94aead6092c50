"""How paths say split and class: [common directories/][train|val|...]/class/.../image."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from podscale.shards.sources.base import TRAIN, VALIDATION, Where, decode_name

SPLIT_FOLDERS = {
    b"train": TRAIN,
    b"training": TRAIN,
    b"val": VALIDATION,
    b"valid": VALIDATION,
    b"validation": VALIDATION,
}
TEST_FOLDER = b"test"
"""A folder beside train/ that is left out: its images are for a last look, not for model selection."""

IMAGE_SUFFIXES = frozenset(
    (b".jpg", b".jpeg", b".jpe", b".jfif", b".png", b".gif", b".bmp", b".webp", b".tif", b".tiff", b".ppm", b".heic")
)
"""Names that claim to be images. Formats that are not usable are listed too, so that they are reported, not ignored."""


def is_image_name(name: bytes) -> bool:
    """Whether a file name claims to be an image; hidden files (AppleDouble "._x.jpg") do not."""
    base = name.rsplit(b"/", 1)[-1]
    dot = base.rfind(b".")
    return dot > 0 and base[:1] != b"." and base[dot:].lower() in IMAGE_SUFFIXES


class SplitAndClass(NamedTuple):
    split: str
    label: str


def count_common_directories(paths: Sequence[bytes]) -> int:
    """How many leading directories all paths share, not counting one that names a split or is the only class."""
    shared = paths[0].split(b"/")[:-1]
    fewest = len(shared)
    for path in paths:
        parts = path.split(b"/")[:-1]
        fewest = min(fewest, len(parts))
        while parts[: len(shared)] != shared:
            shared.pop()
    for depth, part in enumerate(shared):
        if part.lower() in SPLIT_FOLDERS:
            return depth
    return min(len(shared), fewest - 1) if fewest else 0


def classify_path(path: bytes, skip: int, splits: bool, where: Where) -> SplitAndClass | None:
    """Split and class of a path below `skip` common directories; None where it belongs to no split (test/).

    Raises InputError where the path has no class directory.
    """
    parts: Sequence[bytes] = path.split(b"/")[skip:]
    split = ""
    if splits:
        first = parts[0].lower()
        if first == TEST_FOLDER:
            return None
        if first in SPLIT_FOLDERS:
            split, parts = SPLIT_FOLDERS[first], parts[1:]
        else:
            raise where.below(path).refusal(
                "neither below train/ nor below val/",
                "With split folders every image must be in one: move it, or remove them to have images held out.",
            )
    if len(parts) < 2:
        raise where.below(path).refusal(
            "not inside a class folder",
            "Use <class>/<image>, or train/<class>/<image> and val/<class>/<image>, or a table of path,label.",
        )
    return SplitAndClass(split, decode_name(parts[0]))


def has_splits(paths: Sequence[bytes], skip: int) -> bool:
    """Whether the first directory below the common ones names splits.

    `train` may also be a class (COCO has one): it names a split where there are class folders below it.
    """
    named = [parts for parts in (path.split(b"/")[skip:] for path in paths) if parts[0].lower() in SPLIT_FOLDERS]
    return bool(named) and all(len(parts) >= 3 for parts in named)


def classify_paths(paths: Sequence[bytes], where: Where) -> Iterator[tuple[int, SplitAndClass]]:
    """Number, split and class of every path that belongs to a split."""
    skip = count_common_directories(paths) if paths else 0
    splits = has_splits(paths, skip)
    for number, path in enumerate(paths):
        found = classify_path(path, skip, splits, where)
        if found is not None:
            yield number, found
