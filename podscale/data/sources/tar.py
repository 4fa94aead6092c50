"""Tar source: images in class folders or in WebDataset form (<key>.jpg beside <key>.cls). Nothing is extracted."""

import re
import tarfile
from collections.abc import Iterator
from typing import IO, NamedTuple

from podscale.data.sources.base import (
    SPLIT_FOLDERS,
    SourceItem,
    Where,
    classify_paths,
    decode_name,
    is_image_name,
    numeric_class_name,
)
from podscale.data.sources.storage import Storage


class TarMember(NamedTuple):
    """Regular file inside a tar; offset and size of its content are in bytes."""

    name: bytes
    offset: int
    size: int


def is_tar_name(name: bytes) -> bool:
    return name.lower().endswith(b".tar")


def is_compressed_tar_name(name: bytes) -> bool:
    return name.lower().endswith((b".tar.gz", b".tgz", b".tar.bz2", b".tar.xz", b".tar.zst"))


def tar_members(file: IO[bytes], where: Where) -> Iterator[TarMember]:
    """Yield the regular files of an uncompressed tar; raises InputError if it is not one or is truncated."""
    try:
        with tarfile.open(fileobj=file, mode="r:") as archive:
            while (info := archive.next()) is not None:
                archive.members.clear()  # type: ignore[attr-defined]  # tarfile keeps every header in memory
                if info.isreg():
                    name = info.name.encode("utf-8", "surrogateescape").removeprefix(b"./")
                    yield TarMember(name, info.offset_data, info.size)
    except (tarfile.TarError, EOFError) as error:
        raise where.refusal(f"not a complete uncompressed tar file ({error})", "Copy it again.") from error
    except OSError as error:
        raise where.refusal(f"cannot be read: {error}") from error


_SPLIT_WORD = re.compile(rb"(?:^|[/_.-])(train|training|val|valid|validation)(?=[/_.-]|\d)", re.IGNORECASE)


class _Archive(NamedTuple):
    path: bytes
    members: list[TarMember]


class TarSource:
    """Source of one tar file or a directory of them; images are read as byte ranges."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def items(self) -> Iterator[SourceItem]:
        archives = [_Archive(path, self._members(path)) for path in self._paths()]
        if any(member.name.endswith(b".cls") for archive in archives for member in archive.members):
            return self._webdataset(archives)
        return self._class_folders(archives)

    def read(self, item: SourceItem) -> bytes:
        return self._storage.read(item.container, item.offset, item.size)

    def _paths(self) -> list[bytes]:
        listed = sorted(file.path for file in self._storage.files())
        archives = [path for path in listed if is_tar_name(path or self._storage.location.encode())]
        if not archives:
            compressed = any(is_compressed_tar_name(path or self._storage.location.encode()) for path in listed)
            hint = "Decompress it: images are read as byte ranges of the tar." if compressed else "Give a .tar."
            raise Where(self._storage.location).refusal("no uncompressed tar file", hint)
        return archives

    def _members(self, path: bytes) -> list[TarMember]:
        where = Where(self._storage.location)
        where = where.below(path) if path else where
        try:
            file = self._storage.open(path)
        except OSError as error:
            raise where.refusal(f"cannot be opened: {error.strerror or error}") from error
        with file:
            return [m for m in tar_members(file, where) if is_image_name(m.name) or m.name.endswith(b".cls")]

    def _class_folders(self, archives: list[_Archive]) -> Iterator[SourceItem]:
        members = [(archive.path, member) for archive in archives for member in archive.members]
        where = Where(self._storage.location)
        for number, (split, label) in classify_paths([member.name for _, member in members], where):
            path, member = members[number]
            yield SourceItem(_member_name(path, member.name), label, member.size, split, path, member.offset)

    def _webdataset(self, archives: list[_Archive]) -> Iterator[SourceItem]:
        samples = [(archive.path, *sample) for archive in archives for sample in self._samples(archive)]
        largest = max(label for _, _, label in samples)
        splits = [_split_of(path) for path, _, _ in samples]
        named = all(splits)  # archive names count only if all of them name a split
        for (path, member, label), split in zip(samples, splits, strict=True):
            name = numeric_class_name(label, largest)
            yield SourceItem(
                _member_name(path, member.name), name, member.size, split if named else "", path, member.offset
            )

    def _samples(self, archive: _Archive) -> Iterator[tuple[TarMember, int]]:
        """Pair images and labels by key: the path up to the first dot of its last part (WebDataset's rule)."""
        images: dict[bytes, TarMember] = {}
        labels: dict[bytes, int] = {}
        where = Where(self._storage.location)
        where = where.below(archive.path) if archive.path else where
        for member in archive.members:
            key = _sample_key(member.name)
            if key in (labels if member.name.endswith(b".cls") else images):
                raise where.refusal(f"two samples have the key {decode_name(key)}", "Give every sample its own key.")
            if member.name.endswith(b".cls"):
                labels[key] = self._label(archive.path, member, where)
            else:
                images[key] = member
        if images.keys() != labels.keys():
            odd = decode_name(min(images.keys() ^ labels.keys()))
            raise where.refusal(f"sample {odd} has no image or no .cls", "Every sample needs both.")
        return ((image, labels[key]) for key, image in images.items())

    def _label(self, path: bytes, member: TarMember, where: Where) -> int:
        text = self._storage.read(path, member.offset, min(member.size, 32))
        if not re.fullmatch(rb"\s*\d{1,9}\s*", text):
            raise where.below(member.name).refusal(f"{text!r} is not a class number")
        return int(text)


def _member_name(path: bytes, name: bytes) -> bytes:
    return path + b"!" + name if path else name


def _sample_key(name: bytes) -> bytes:
    return name[: name.find(b".", name.rfind(b"/") + 1)]


def _split_of(path: bytes) -> str:
    words = _SPLIT_WORD.findall(path)
    return SPLIT_FOLDERS[words[-1].lower()] if words else ""
