"""Members of tar files by name and byte range: streamed, never extracted, so that links and paths can do no harm."""

import tarfile
from collections.abc import Iterator
from typing import IO, NamedTuple

from podscale.shards.sources.base import Where


class TarMember(NamedTuple):
    """A regular file inside a tar: its name and where its content is, in bytes from the beginning of the tar."""

    name: bytes
    offset: int
    size: int


def is_tar_name(name: bytes) -> bool:
    return name.lower().endswith(b".tar")


def is_compressed_tar_name(name: bytes) -> bool:
    return name.lower().endswith((b".tar.gz", b".tgz", b".tar.bz2", b".tar.xz", b".tar.zst"))


def tar_members(file: IO[bytes], where: Where) -> Iterator[TarMember]:
    """The regular files of an uncompressed tar; raises InputError where it is none or is cut short."""
    try:
        with tarfile.open(fileobj=file, mode="r:") as archive:
            while (info := archive.next()) is not None:
                archive.members.clear()  # type: ignore[attr-defined]  # it keeps every header: memory stays flat
                if info.isreg():
                    name = info.name.encode("utf-8", "surrogateescape").removeprefix(b"./")
                    yield TarMember(name, info.offset_data, info.size)
    except (tarfile.TarError, EOFError) as error:
        raise where.refusal(f"not a complete uncompressed tar file ({error})", "Copy it again.") from error
    except OSError as error:
        raise where.refusal(f"cannot be read: {error}") from error
