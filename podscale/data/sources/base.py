"""Source interface, which lists items and reads one of them, and the path convention of class folders.

Split and class come from the path: [common directories/][train|val|...]/class/.../image.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from podscale.errors import InputError

TRAIN, VALIDATION = "train", "validation"


class SourceItem(NamedTuple):
    """One image as listed, before anything of it was read."""

    name: bytes
    """Its name inside the source: unique, stable, any encoding; the listing is sorted by it."""
    label: str
    """Its class name."""
    size: int
    """Its bytes as listed."""
    split: str = ""
    """"train", "validation", or empty if the source does not name a split."""
    container: bytes = b""
    """The file that holds it as a byte range; empty if it is a file of its own."""
    offset: int = 0
    """Its offset in its container, in bytes."""


class Source(Protocol):
    """A place that images come from; it is picklable, because packing processes read from it too."""

    def items(self) -> Iterator[SourceItem]:
        """Every image, in any order; raises InputError if the source as a whole cannot be used."""
        ...

    def read(self, item: SourceItem) -> bytes:
        """Read the bytes of one item; raises OSError if that fails."""
        ...


class SourceMissing(InputError):
    """Nothing exists at `data.source`."""


class Where(NamedTuple):
    """Source, or a file of it, that an error is about.

    Args:
        location: `data.source` of the document.
        path: file below it, with the archive that it is in; "" = the source itself.
    """

    location: str
    path: str = ""

    def below(self, path: bytes) -> "Where":
        name = decode_name(path)
        return Where(self.location, f"{self.path}: {name}" if self.path else name)

    def refusal(self, problem: str, hint: str = "") -> InputError:
        about = f"{self.path}: {problem}" if self.path else problem
        return InputError(about, field="data.source", got=self.location, hint=hint)


def decode_name(raw: bytes) -> str:
    """A class name for people and JSON; bytes that are no UTF-8 are shown as escapes."""
    return raw.decode("utf-8", "backslashreplace")


def numeric_class_name(label: int, largest: int) -> str:
    """An integer label as a class name; all of one width, so that sorted names are in numeric order."""
    return f"{label:0{len(str(largest))}d}"


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
    """Return whether a file name claims to be an image; hidden files (AppleDouble "._x.jpg") do not."""
    base = name.rsplit(b"/", 1)[-1]
    dot = base.rfind(b".")
    return dot > 0 and base[:1] != b"." and base[dot:].lower() in IMAGE_SUFFIXES


class SplitAndClass(NamedTuple):
    split: str
    label: str


def count_common_directories(paths: Sequence[bytes]) -> int:
    """Return the number of leading directories that all paths share, without one that is a split or the only class."""
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
    """Split and class of a path below `skip` common directories; None if it belongs to no split (test/).

    Raises InputError if the path has no class directory.
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
    """Return whether the first directory below the common ones names splits.

    `train` may also be a class (COCO has one): it names a split if there are class folders below it.
    """
    named = [parts for parts in (path.split(b"/")[skip:] for path in paths) if parts[0].lower() in SPLIT_FOLDERS]
    return bool(named) and all(len(parts) >= 3 for parts in named)


def classify_paths(paths: Sequence[bytes], where: Where) -> Iterator[tuple[int, SplitAndClass]]:
    """Number, split and class of every path that belongs to a split."""
    skip = count_common_directories(paths) if paths else 0
    splits = has_splits(paths, skip)
    for number, path in enumerate(paths):
        split_and_label = classify_path(path, skip, splits, where)
        if split_and_label is not None:
            yield number, split_and_label
