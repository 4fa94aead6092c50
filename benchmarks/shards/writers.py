"""Writers of shards that are compared: Podscale's, those of other packages, and the least that a copy can cost."""

import mmap
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile

from benchmarks.shards.sources import Originals, entries
from podscale.config.data import DataSection
from podscale.data.sharding.pack import Packer, PackTask
from podscale.data.sharding.pack_progress import PackProgress
from podscale.data.sharding.shard_plan import ShardPlan
from podscale.data.sharding.validate_image import ImageRules

Writer = Callable[[Path], None]
"""Writes the planned images into an empty folder."""
Copy = Callable[[int, int], None]
"""Copies the planned images from one file descriptor to another."""
SHARD_BYTES = 256 * 2**20
PIECE, PAGE = 2**20, 2**12
"""Bytes of one write, and their alignment for O_DIRECT."""


def podscale_writer(plan: ShardPlan, source: Originals, data: DataSection, *, decode: bool, sha256: bool) -> Writer:
    """Podscale's packer, with or without strict validation and hashes of shards."""

    def write(out: Path) -> None:
        for name in ("train", "records/train"):
            (out / name).mkdir(parents=True)
        packer = Packer(out, data, replace(ImageRules.from_section(data), decode=decode), hash_shards=sha256)
        for shard in range(plan.shard_count("train")):
            packer.pack(plan, source, PackTask("train", shard), ignore)

    return write


def ignore(progress: PackProgress) -> None:
    """Report no progress."""


def webdataset_writer(plan: ShardPlan, source: Originals) -> Writer:
    """webdataset's ShardWriter."""
    import webdataset

    def write(out: Path) -> None:
        with webdataset.ShardWriter(str(out / "%05d.tar"), maxsize=SHARD_BYTES, verbose=0) as writer:
            for entry in entries(plan):
                writer.write({"__key__": f"{entry.key:08d}", "jpg": source.read(entry.item), "cls": entry.label})

    return write


def mds_writer(plan: ShardPlan, source: Originals, hashes: list[str]) -> Writer:
    """mosaicml-streaming's MDSWriter."""
    from streaming import MDSWriter

    columns = {"image": "bytes", "label": "int"}

    def write(out: Path) -> None:
        with MDSWriter(out=str(out), columns=columns, size_limit=SHARD_BYTES, hashes=hashes) as writer:
            for entry in entries(plan):
                writer.write({"image": source.read(entry.item), "label": entry.label})

    return write


def all_writers(plan: ShardPlan, source: Originals, data: DataSection, scratch: Path) -> dict[str, Writer]:
    """Every writer that can be had here, by name; limits of a copy have names that begin with `limit: `."""
    writers: dict[str, Writer] = {}
    for decode, sha256 in ((False, False), (False, True), (True, False), (True, True)):
        name = f"podscale: {'strict validation' if decode else 'copy'}{', sha256 of shards' if sha256 else ''}"
        writers[name] = podscale_writer(plan, source, data, decode=decode, sha256=sha256)
    others: dict[str, Callable[[], Writer]] = {
        "webdataset: ShardWriter": lambda: webdataset_writer(plan, source),
        "mosaicml-streaming: MDSWriter": lambda: mds_writer(plan, source, []),
        "mosaicml-streaming: MDSWriter, sha256 of shards": lambda: mds_writer(plan, source, ["sha256"]),
    }
    for name, make in others.items():
        try:
            writers[name] = make()
        except ImportError as error:
            print(f"{name}: not measured ({error})", file=sys.stderr)
    return writers | plain_writers(plan, source, direct=takes_direct(scratch))


def takes_direct(folder: Path) -> bool:
    """Try O_DIRECT on the file system; tmpfs may refuse it."""
    with TemporaryFile(dir=folder) as file:
        try:
            os.close(os.open(f"/proc/self/fd/{file.fileno()}", os.O_WRONLY | os.O_DIRECT))
        except OSError as error:
            print(f"O_DIRECT: not measured ({error.strerror})", file=sys.stderr)
            return False
    return True


def plain_writers(plan: ShardPlan, source: Originals, *, direct: bool) -> dict[str, Writer]:
    """The least that copying the planned images can cost, by ways to do it."""
    places = [(entry.item.offset, entry.item.size) for entry in entries(plan)]
    total = sum(size for _, size in places)
    largest = max(size for _, size in places)

    def into_file(copy: Copy, flags: int = 0) -> Writer:
        def write(out: Path) -> None:
            archive = os.open(source.archive, os.O_RDONLY)
            target = os.open(out / "plain", os.O_WRONLY | os.O_CREAT | flags)
            os.posix_fallocate(target, 0, total)
            copy(archive, target)
            os.fsync(target)
            os.close(archive)
            os.close(target)

        return write

    def megabytes(archive: int, target: int) -> None:
        buffer = memoryview(mmap.mmap(-1, PIECE + largest + PAGE))  # aligned to pages, as O_DIRECT asks
        filled = 0
        for offset, size in places:
            filled += os.preadv(archive, [buffer[filled : filled + size]], offset)
            while filled >= PIECE:
                os.write(target, buffer[:PIECE])
                filled -= PIECE
                buffer[:filled] = buffer[PIECE : PIECE + filled]
        os.write(target, buffer[: -(-filled // PAGE) * PAGE])

    def sendfile(archive: int, target: int) -> None:
        for offset, size in places:
            for sent in range(0, size, 2**30):
                os.sendfile(target, archive, offset + sent, min(size - sent, 2**30))

    def copy_file_range(archive: int, target: int) -> None:
        for offset, size in places:
            os.copy_file_range(archive, target, size, offset)

    def read(archive: int, target: int) -> None:
        for offset, size in places:
            os.pread(archive, size, offset)

    found = {
        "limit: read alone": into_file(read),
        "limit: read, write by the megabyte": into_file(megabytes),
        "limit: sendfile": into_file(sendfile),
        "limit: copy_file_range": into_file(copy_file_range),
    }
    if direct:
        found["limit: read, write by the megabyte with O_DIRECT"] = into_file(megabytes, os.O_DIRECT)
    return found
