"""Storage of a source's files (local, names as bytes, or any fsspec URL), and the source of class folders."""

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import IO, Any, NamedTuple, Protocol

from podscale.data.sources.base import SourceItem, SourceMissing, Where, classify_paths, decode_name, is_image_name
from podscale.errors import InputError
from podscale.util.formatting import first_line
from podscale.util.locations import Location

# Paths are bytes of any encoding, which pathlib does not take.
# ruff: noqa: PTH110, PTH111, PTH112, PTH113, PTH116, PTH118, PTH123, PTH208

MAX_READ_BYTES = 2**30


class StorageFile(NamedTuple):
    """File with its path relative to the root and its size in bytes."""

    path: bytes
    size: int


class Storage(Protocol):
    """Files below a root. Paths are relative to it, separated by slashes; b"" is the root itself."""

    location: str

    def files(self) -> Iterator[StorageFile]:
        """Yield the files below the root except hidden ones, folder by folder by name; b"" if the root is a file."""
        ...

    def top_level_names(self) -> list[bytes]:
        """Return the names directly below the root, sorted; only b"" if the root is a file."""
        ...

    def read(self, path: bytes, offset: int = 0, size: int | None = None) -> bytes:
        """Return a whole file, or a byte range of it; raises OSError."""
        ...

    def open(self, path: bytes) -> IO[bytes]:
        """Open a file for seeking and reading; raises OSError."""
        ...

    def size(self, path: bytes) -> int:
        """Return the size of one file in bytes; raises OSError."""
        ...


def open_storage(location: str) -> Storage:
    """Open the storage of a path or URL; raises SourceMissing if nothing is there."""
    parsed = Location.parse(location)
    return RemoteStorage(location) if parsed.is_remote else LocalStorage(parsed.path)


class LocalStorage:
    """Directory or file of this machine; symbolic links are followed, loops are refused."""

    def __init__(self, location: str) -> None:
        self.location = location
        self._root = os.fsencode(os.path.expanduser(location)).rstrip(b"/") or b"/"
        if not os.path.exists(self._root):
            raise SourceMissing(
                "no such file or directory", field="data.source", got=location, hint="Give the path of the images."
            )
        self._opened: tuple[bytes, int] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    def _absolute(self, path: bytes) -> bytes:
        return os.path.join(self._root, path) if path else self._root

    def files(self) -> Iterator[StorageFile]:
        if os.path.isfile(self._root):
            yield StorageFile(b"", os.stat(self._root).st_size)
        else:
            yield from self._walk(b"", ())

    def top_level_names(self) -> list[bytes]:
        try:
            return sorted(os.listdir(self._root)) if os.path.isdir(self._root) else [b""]
        except OSError as error:
            raise Where(self.location).refusal(f"cannot be listed: {error.strerror}") from error

    def _walk(self, relative: bytes, ancestors: tuple[tuple[int, int], ...]) -> Iterator[StorageFile]:
        """Yield the files below `relative`; `ancestors` are (device, inode) of its parents, to detect loops."""
        here = self._absolute(relative)
        try:
            status = os.stat(here)
            identity = (status.st_dev, status.st_ino)
            if identity in ancestors:
                raise (
                    Where(self.location)
                    .below(relative)
                    .refusal("symbolic link to a directory above itself", "Remove the link.")
                )
            with os.scandir(here) as entries:
                for entry in sorted(entries, key=lambda entry: entry.name):
                    if entry.name.startswith(b"."):
                        continue
                    path = relative + b"/" + entry.name if relative else entry.name
                    if _is_directory(entry) and not (relative and is_image_name(entry.name)):
                        yield from self._walk(path, (*ancestors, identity))
                    else:
                        yield StorageFile(path, _file_size(entry))
        except OSError as error:
            where = Where(self.location, decode_name(relative))
            raise where.refusal(f"cannot be listed: {error.strerror}", "Make it readable or remove it.") from error

    def read(self, path: bytes, offset: int = 0, size: int | None = None) -> bytes:
        if size is not None:
            return self._read_range(path, offset, size)
        descriptor = os.open(self._absolute(path), os.O_RDONLY | os.O_NONBLOCK)  # do not wait for a pipe
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise IsADirectoryError(21, "not a regular file")
            content = os.read(descriptor, min(status.st_size + 1, MAX_READ_BYTES))
            return content if len(content) >= status.st_size else content + _read_to_end(descriptor)
        finally:
            os.close(descriptor)

    def _read_range(self, path: bytes, offset: int, size: int) -> bytes:
        if self._opened is None or self._opened[0] != path:  # reads of one container are consecutive
            if self._opened is not None:
                os.close(self._opened[1])
                self._opened = None
            self._opened = (path, os.open(self._absolute(path), os.O_RDONLY))
        content = os.pread(self._opened[1], size, offset)
        while len(content) < size and (rest := os.pread(self._opened[1], size - len(content), offset + len(content))):
            content += rest  # the kernel may return less than was asked, on network file systems above all
        return content

    def open(self, path: bytes) -> IO[bytes]:
        return open(self._absolute(path), "rb")

    def size(self, path: bytes) -> int:
        return os.stat(self._absolute(path)).st_size


def _is_directory(entry: os.DirEntry[bytes]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _file_size(entry: os.DirEntry[bytes]) -> int:
    """Return the size of a file; 0 for a directory and a broken link, which packing rejects as unreadable."""
    try:
        return 0 if entry.is_dir() else entry.stat().st_size
    except OSError:
        return 0


def _read_to_end(descriptor: int) -> bytes:
    parts = []
    while part := os.read(descriptor, MAX_READ_BYTES):
        parts.append(part)
    return b"".join(parts)


class RemoteStorage:
    """Files below a URL that fsspec reads (gs://, s3://, https://, ...), with the environment's credentials."""

    def __init__(self, location: str) -> None:
        self.location = location.rstrip("/")
        _, self._root = self._connect()
        try:
            if not self._fs.exists(self._root):
                raise SourceMissing(
                    "nothing at this URL", field="data.source", got=location, hint="Check it and your access to it."
                )
        except InputError:
            raise
        except Exception as error:  # every backend has errors of its own
            raise Where(location).refusal(f"cannot be reached: {first_line(error)}") from error

    def _connect(self) -> tuple[Any, str]:
        import fsspec

        try:
            fs, root = fsspec.core.url_to_fs(self.location)
        except (ImportError, ValueError) as error:
            raise Where(self.location).refusal(
                f"this kind of URL is not supported here: {first_line(error)}",
                "For gs:// and s3:// run `pip install 'podscale[cluster]'`",
            ) from error
        return fs, str(root).rstrip("/")

    @cached_property
    def _fs(self) -> Any:
        return self._connect()[0]

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_fs"}  # connections are not shared

    def _absolute(self, path: bytes) -> str:
        text = path.decode("utf-8", "surrogateescape")
        return f"{self._root}/{text}" if path else self._root

    def files(self) -> Iterator[StorageFile]:
        if self._is_file():
            yield StorageFile(b"", self.size(b""))
            return
        listing = self._list(lambda: self._fs.find(self._root, detail=True))
        for name, info in listing.items():
            relative = name[len(self._root) :].lstrip("/")
            if not any(part.startswith(".") for part in relative.split("/")):
                path = relative.encode("utf-8", "surrogateescape")
                size = info.get("size")
                yield StorageFile(path, int(size) if size is not None else self.size(path))

    def top_level_names(self) -> list[bytes]:
        if self._is_file():
            return [b""]
        names = self._list(lambda: self._fs.ls(self._root, detail=False))
        return sorted(str(name).rstrip("/").rpartition("/")[2].encode("utf-8", "surrogateescape") for name in names)

    def _is_file(self) -> bool:
        return bool(self._list(lambda: self._fs.isfile(self._root)))

    def _list(self, ask: Callable[[], Any]) -> Any:
        try:
            return ask()
        except Exception as error:  # every backend has errors of its own
            raise Where(self.location).refusal(f"cannot be listed: {first_line(error)}") from error

    def read(self, path: bytes, offset: int = 0, size: int | None = None) -> bytes:
        with _as_os_error():
            end = None if size is None else offset + size
            return bytes(self._fs.cat_file(self._absolute(path), start=offset or None, end=end))

    def open(self, path: bytes) -> IO[bytes]:
        with _as_os_error():
            file: IO[bytes] = self._fs.open(self._absolute(path), "rb")
            return file

    def size(self, path: bytes) -> int:
        with _as_os_error():
            return int(self._fs.size(self._absolute(path)) or 0)


@contextmanager
def _as_os_error() -> Iterator[None]:
    """Raise a backend's errors as OSError."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(5, first_line(error)) from error


class ImageFolderSource:
    """Source of <class>/.../<image>, optionally below train/ and val/."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def items(self) -> Iterator[SourceItem]:
        files = [file for file in self._storage.files() if is_image_name(file.path)]
        where = Where(self._storage.location)
        for number, (split, label) in classify_paths([file.path for file in files], where):
            yield SourceItem(files[number].path, label, files[number].size, split)

    def read(self, item: SourceItem) -> bytes:
        return self._storage.read(item.name)
