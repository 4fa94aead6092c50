"""Source interface, and the paths of class folders: [common directories/][train|val|...]/class/.../image."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from podscale.errors import InputError

TRAIN, VALIDATION = "train", "validation"


class SourceItem(NamedTuple):
    """One image as listed, before it was read."""

    name: bytes
    """Name inside the source: unique, stable, any encoding; the listing is sorted by it."""
    label: str
    """Class name."""
    size: int
    split: str = ""
    """"train", "validation", or empty if the source has no splits."""
    container: bytes = b""
    """File that holds the image as a byte range; empty if it is a file of its own."""
    offset: int = 0


class Source(Protocol):
    """Source of images; picklable, because packing processes also read from it."""

    def items(self) -> Iterator[SourceItem]:
        """Yield every image, in any order; raises InputError if the source cannot be used."""
        ...

    def read(self, item: SourceItem) -> bytes:
        """Return the bytes of one item; raises OSError if it cannot be read."""
        ...


class SourceMissing(InputError):
    """Nothing exists at `data.source`."""


class Where(NamedTuple):
    """Location that an error is about: `data.source`, or the file at `path` below it."""

    location: str
    path: str = ""

    def below(self, path: bytes) -> "Where":
        name = decode_name(path)
        return Where(self.location, f"{self.path}: {name}" if self.path else name)

    def refusal(self, problem: str, hint: str = "") -> InputError:
        about = f"{self.path}: {problem}" if self.path else problem
        return InputError(about, field="data.source", got=self.location, hint=hint)


def decode_name(raw: bytes) -> str:
    """Return a name as text for messages and JSON; bytes that are not UTF-8 become escapes."""
    return raw.decode("utf-8", "backslashreplace")


def numeric_class_name(label: int, largest: int) -> str:
    """Return an integer label as a class name of fixed width, so that sorted names are in numeric order."""
    return f"{label:0{len(str(largest))}d}"


SPLIT_FOLDERS = {
    b"train": TRAIN,
    b"training": TRAIN,
    b"val": VALIDATION,
    b"valid": VALIDATION,
    b"validation": VALIDATION,
}
TEST_FOLDER = b"test"
"""Folder beside train/ that is skipped, because its images are not for model selection."""

IMAGE_SUFFIXES = frozenset(
    (b".jpg", b".jpeg", b".jpe", b".jfif", b".png", b".gif", b".bmp", b".webp", b".tif", b".tiff", b".ppm", b".heic")
)
"""Suffixes of images; they include unusable formats, so that such images are reported as rejects."""


def is_image_name(name: bytes) -> bool:
    """Return whether a file name has an image suffix and is not hidden (such as AppleDouble's "._x.jpg")."""
    base = name.rsplit(b"/", 1)[-1]
    dot = base.rfind(b".")
    return dot > 0 and base[:1] != b"." and base[dot:].lower() in IMAGE_SUFFIXES


class SplitAndClass(NamedTuple):
    split: str
    label: str


def count_common_directories(paths: Sequence[bytes]) -> int:
    """Return the number of leading directories that all paths share; a split or the only class does not count."""
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
    """Return split and class of a path below `skip` directories; None for test/, InputError if it has no class."""
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
                "in neither train/ nor val/",
                "With split folders every image must be in one. Move it, or remove the split folders: then a part of "
                "the images is held out.",
            )
    if len(parts) < 2:
        raise where.below(path).refusal(
            "not inside a class folder",
            "Use <class>/<image>, or train/<class>/<image> and val/<class>/<image>, or a table of path,label.",
        )
    return SplitAndClass(split, decode_name(parts[0]))


def has_splits(paths: Sequence[bytes], skip: int) -> bool:
    """Return whether the first directories are splits. `train` without class folders in it is a class (as in COCO)."""
    named = [parts for parts in (path.split(b"/")[skip:] for path in paths) if parts[0].lower() in SPLIT_FOLDERS]
    return bool(named) and all(len(parts) >= 3 for parts in named)


def classify_paths(paths: Sequence[bytes], where: Where) -> Iterator[tuple[int, SplitAndClass]]:
    """Yield number, split and class of every path that belongs to a split."""
    skip = count_common_directories(paths) if paths else 0
    splits = has_splits(paths, skip)
    for number, path in enumerate(paths):
        split_and_label = classify_path(path, skip, splits, where)
        if split_and_label is not None:
            yield number, split_and_label
