"""What a source of images is: something that lists items and reads one of them."""

from collections.abc import Iterator
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
    """"train", "validation", or empty where the source does not say."""
    container: bytes = b""
    """The file that holds it as a byte range; empty where it is a file of its own."""
    offset: int = 0
    """Where it begins in its container, in bytes."""


class Source(Protocol):
    """A place that images come from; it is picklable, because packing processes read from it too."""

    def items(self) -> Iterator[SourceItem]:
        """Every image, in any order; raises InputError where the source as a whole cannot be used."""
        ...

    def read(self, item: SourceItem) -> bytes:
        """The bytes of one item; raises OSError where they cannot be had."""
        ...


class SourceMissing(InputError):
    """There is nothing at the place the document names."""


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
