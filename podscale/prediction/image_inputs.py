"""Image inputs of a prediction: files, folders, tars, shard sets, URLs and lists, as a stream in a fixed order.

Nothing is read twice, and only the names of one folder are kept (of a folder behind a URL: all names below it). Folders
are listed by name, each with its subfolders; tars and shard sets in their own order.
"""

import io
import pickle
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from podscale.config import RunConfig
from podscale.data.manifest import MANIFEST_FILE
from podscale.data.sources.base import Where, decode_name, is_image_name
from podscale.data.sources.storage import Storage, StorageFile, open_storage
from podscale.data.sources.tar import is_compressed_tar_name, is_tar_name, tar_members
from podscale.errors import InputError
from podscale.util.formatting import printable

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from podscale.data.shard_set import ShardSet

STANDARD_INPUT = "-"
SHARD_SET_FILES = {MANIFEST_FILE.encode(), b"classes.json"}
UNREADABLE = "unreadable"
"""Reason of an image whose bytes cannot be read."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Reason why an image has no prediction: a stable key, and a text for users."""

    reason: str
    detail: str


class ImageItem(NamedTuple):
    """One image, before it is read; small and picklable.

    `name` is fit for any output: bytes that are not UTF-8 are escapes.
    `path`, `offset` and `size` locate its bytes inside the input with number `source`; in a shard set they are the
    split, the row and None. `label` is the true class, if a shard set has it. An item with a `failure` cannot be read.
    """

    name: str
    source: int
    path: bytes = b""
    offset: int | None = None
    size: int | None = None
    label: str | None = None
    failure: Failure | None = None


class EncodedImage(NamedTuple):
    """Bytes of an image file; or a record of a shard set, uint8 [bytes], with its validated (height, width)."""

    data: "bytes | npt.NDArray[np.uint8]"
    shape: tuple[int, int] = (0, 0)


class TooLarge(Exception):
    """Image file with more bytes than allowed, which was not read."""


class ImageInput(Protocol):
    """One of the inputs that the user named; picklable, and `read` is safe from several threads."""

    location: str

    @property
    def count(self) -> int | None:
        """Number of images, None if it is not known without listing them."""
        ...

    def items(self, source: int) -> Iterator[ImageItem]:
        """Yield the images in order, with `source` as their input's number."""
        ...

    def read(self, item: ImageItem, max_bytes: int) -> EncodedImage:
        """Return the bytes of an image. Raises OSError, InputError, or TooLarge above `max_bytes`."""
        ...


def open_inputs(locations: Sequence[str], config: RunConfig, lines: Iterable[str] = ()) -> list[ImageInput]:
    """Open the inputs of a prediction. Raises InputError if one of them does not exist.

    Args:
        locations: paths or fsspec URLs of files, folders, tars and shard sets; `-` for the list in `lines`.
        config: run document with the settings of the shard cache.
        lines: one path or URL of an image each.
    """
    if not locations:
        raise InputError("nothing to predict", field="IMAGES", hint="Name files, folders, tars, a shard set, or -.")
    if list(locations).count(STANDARD_INPUT) > 1:
        raise InputError("standard input can be read once", field="IMAGES", got=STANDARD_INPUT)
    return [_open_input(location, config, lines) for location in locations]


def iter_items(inputs: Sequence[ImageInput]) -> Iterator[ImageItem]:
    """Yield the images of all inputs. An input that cannot be listed to its end yields one failed item there."""
    for number, source in enumerate(inputs):
        try:
            yield from source.items(number)
        except InputError as error:
            yield ImageItem(_as_text(source.location), number, failure=Failure(UNREADABLE, error.problem))


def _open_input(location: str, config: RunConfig, lines: Iterable[str]) -> ImageInput:
    if location == STANDARD_INPUT:
        return ListInput(lines)
    try:
        storage = open_storage(location)
        if shard_set := _find_shard_set(location, storage, config):
            return shard_set
        if is_compressed_tar_name(_as_bytes(location)):
            raise Where(location).refusal("a compressed tar", "Decompress it: images are read as byte ranges.")
    except InputError as error:
        raise InputError(error.problem, field=location, hint=error.hint) from error
    return StorageInput(location, storage)


def _find_shard_set(location: str, storage: Storage, config: RunConfig) -> "ShardSetInput | None":
    """Return the shard set at a location, or the one that the location is a split of."""
    names = storage.top_level_names()
    if SHARD_SET_FILES.issubset(names):
        return ShardSetInput(location, config).opened()
    parent, _, split = location.rstrip("/").rpartition("/")
    if b"index" in names and split and SHARD_SET_FILES.issubset(open_storage(parent or ".").top_level_names()):
        return ShardSetInput(parent or ".", config, (split,)).opened()
    return None


class StorageInput:
    """Image file, tar, or folder of both."""

    count = None

    def __init__(self, location: str, storage: Storage) -> None:
        self.location, self._storage = location.rstrip("/") or location, storage
        self._thread_local = threading.local()

    def __getstate__(self) -> dict[str, Any]:
        return {"location": self.location, "_storage": self._storage}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._thread_local = threading.local()

    def items(self, source: int) -> Iterator[ImageItem]:
        for file in self._storage.files():
            name = self._name_of(file.path)
            if is_tar_name(file.path or _as_bytes(self.location)):
                yield from self._members(file, name, source)
            elif is_image_name(file.path) or not file.path:  # a file that was named is an image, whatever its name
                yield ImageItem(name, source, file.path, size=file.size)

    def read(self, item: ImageItem, max_bytes: int) -> EncodedImage:
        return EncodedImage(_read_bytes(self._thread_storage, item, max_bytes))

    def _members(self, file: StorageFile, name: str, source: int) -> Iterator[ImageItem]:
        try:
            with self._storage.open(file.path) as archive:
                for member in tar_members(archive, Where(self.location)):
                    if is_image_name(member.name):
                        yield ImageItem(
                            f"{name}!{decode_name(member.name)}", source, file.path, member.offset, member.size
                        )
        except OSError as error:
            yield ImageItem(name, source, failure=Failure(UNREADABLE, str(error)))
        except InputError as error:
            yield ImageItem(name, source, failure=Failure(UNREADABLE, error.problem))

    def _name_of(self, path: bytes) -> str:
        location = _as_text(self.location)
        return f"{location.rstrip('/')}/{decode_name(path)}" if path else location

    @property
    def _thread_storage(self) -> Storage:
        """Copy of the storage for this thread, because reads of byte ranges keep the file open."""
        storage: Storage | None = getattr(self._thread_local, "storage", None)
        if storage is None:
            storage = self._thread_local.storage = pickle.loads(pickle.dumps(self._storage))
        return storage


class ListInput:
    """List of images, one path or URL a line; empty lines are skipped."""

    location, count = STANDARD_INPUT, None

    def __init__(self, lines: Iterable[str]) -> None:
        self._lines = lines

    def __getstate__(self) -> dict[str, Any]:
        return {}  # only one process reads the list

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._lines = ()

    def items(self, source: int) -> Iterator[ImageItem]:
        for line in self._lines:
            if path := line.rstrip("\r\n"):
                yield ImageItem(_as_text(path), source, _as_bytes(path))

    def read(self, item: ImageItem, max_bytes: int) -> EncodedImage:
        storage = open_storage(item.path.decode("utf-8", "surrogateescape"))
        return EncodedImage(_read_bytes(storage, item._replace(path=b"", size=storage.size(b"")), max_bytes))


class ShardSetInput:
    """Samples of a shard set: of the splits in `splits`, by default all of them."""

    def __init__(self, location: str, config: RunConfig, splits: Sequence[str] = ()) -> None:
        self.location, self._config, self._splits = location.rstrip("/") or location, config, tuple(splits)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_shard_set"}  # mapped files

    def opened(self) -> "ShardSetInput":
        """Open the set now. Raises InputError if it is damaged."""
        self._splits = self._splits or tuple(self._shard_set.manifest.splits)
        for name in self._splits:
            self._shard_set.split(name)
        return self

    @cached_property
    def _shard_set(self) -> "ShardSet":
        from podscale.data.loaders.build_loader import open_shard_set

        return open_shard_set(self.location, self._config)

    @property
    def count(self) -> int:
        return sum(len(self._shard_set.split(name)) for name in self._splits)

    def items(self, source: int) -> Iterator[ImageItem]:
        location, classes = _as_text(self.location), [printable(name) for name in self._shard_set.classes]
        for name in self._splits:
            split = self._shard_set.split(name)
            for row, label in enumerate(split.labels):
                image = f"{location}/{name}!{decode_name(split.source(row))}"
                yield ImageItem(image, source, name.encode(), row, label=classes[int(label)])

    def read(self, item: ImageItem, max_bytes: int) -> EncodedImage:
        assert item.offset is not None
        split = self._shard_set.split(item.path.decode())
        height, width = (int(split.column(side)[item.offset]) for side in ("height", "width"))
        return EncodedImage(split.read(item.offset), (height, width))


def standard_input_lines() -> Iterable[str]:
    """Return the lines of standard input; bytes that are not UTF-8 stay in them, because file names may have them."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    return sys.stdin


def _as_bytes(location: str) -> bytes:
    return location.encode("utf-8", "surrogateescape")


def _as_text(location: str) -> str:
    return decode_name(_as_bytes(location))


def _read_bytes(storage: Storage, item: ImageItem, max_bytes: int) -> bytes:
    if item.size is not None and item.size > max_bytes:
        raise TooLarge(f"{item.size} bytes, at most {max_bytes} (data.max_bytes)")
    if item.offset is None:
        data = storage.read(item.path)
    else:
        assert item.size is not None
        data = storage.read(item.path, item.offset, item.size)
        if len(data) < item.size:
            raise OSError(5, f"truncated: {len(data)} of {item.size} bytes")
    return data
