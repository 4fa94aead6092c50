"""What a source of images is: something that lists items and reads one of them."""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from podscale.errors import InputError

TRAIN, VALIDATION = "train", "validation"


class Item(NamedTuple):
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

    def items(self) -> Iterator[Item]:
        """Every image, in any order; raises InputError where the source as a whole cannot be used."""
        ...

    def read(self, item: Item) -> bytes:
        """The bytes of one item; raises OSError where they cannot be had."""
        ...


class SourceMissing(InputError):
    """There is nothing at the place the document names."""


def class_name(raw: bytes) -> str:
    """A class name for people and JSON; bytes that are no UTF-8 are shown as escapes."""
    return raw.decode("utf-8", "backslashreplace")


def number_name(label: int, largest: int) -> str:
    """An integer label as a class name; all of one width, so that sorted names are in numeric order."""
    return f"{label:0{len(str(largest))}d}"
