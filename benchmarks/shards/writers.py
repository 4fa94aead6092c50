"""Writers of shards to compare (Podscale's, other packages', plain copies), and the images that they write."""

import mmap
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from podscale.config.data import DataSection
from podscale.data.sharding.pack import Packer, PackTask
from podscale.data.sharding.pack_progress import PackProgress
from podscale.data.sharding.shard_plan import ShardPlan
from podscale.data.sharding.validate_image import ImageRules
from podscale.data.sources import SourceItem
from podscale.data.sources.base import Where
from podscale.data.sources.storage import LocalStorage
from podscale.data.sources.tar import tar_members

Writer = Callable[[Path], None]
"""Writes the planned images into an empty folder."""
Copy = Callable[[int, int], None]
"""Copies the planned images from one file descriptor to another."""
SHARD_BYTES = 256 * 2**20
WRITE_BYTES, PAGE_BYTES = 2**20, 2**12
"""Size of one write, and alignment of O_DIRECT."""


class Originals:
    """Source of the images of an archive (<synset>_<anything>.JPEG), each `repeat` times."""

    def __init__(self, archive: Path, repeat: int) -> None:
        self.archive, self._storage, self._repeat = archive, LocalStorage(str(archive)), repeat

    def items(self) -> Iterator[SourceItem]:
        with self._storage.open(b"") as file:
            for member in tar_members(file, Where(str(self.archive))):
                synset = member.name.rpartition(b"/")[2].partition(b"_")[0].decode()
                for copy in range(self._repeat):
                    # every synset is in both splits, as in a data set; only train is packed
                    split = "validation" if copy == 0 else "train"
                    yield SourceItem(b"%d/" % copy + member.name, synset, member.size, split, b"", member.offset)

    def read(self, item: SourceItem) -> bytes:
        return self._storage.read(b"", item.offset, item.size)


class Synthetic:
    """Source that lists files like ImageNet's, which do not exist."""

    def __init__(self, count: int) -> None:
        self._count, self._classes = count, min(1000, max(1, count // 100))

    def items(self) -> Iterator[SourceItem]:
        for i in range(self._count):
            synset = f"n{i % self._classes * 7919:08d}"
            yield SourceItem(f"train/{synset}/{synset}_{i}.JPEG".encode(), synset, 60_000 + i * 31 % 100_000)

    def read(self, item: SourceItem) -> bytes:
        raise OSError("synthetic files have no content")


def entries(plan: ShardPlan) -> Iterator[Any]:
    """Yield the entries of the training split, shard by shard."""
    for shard in range(plan.shard_count("train")):
        yield from plan.entries("train", shard)


def podscale_writer(plan: ShardPlan, source: Originals, data: DataSection, *, decode: bool, sha256: bool) -> Writer:
    """Return Podscale's packer, optionally with strict validation and hashes of shards."""

    def write(out: Path) -> None:
        for name in ("train", "records/train"):
            (out / name).mkdir(parents=True)
        packer = Packer(out, data, replace(ImageRules.from_section(data), decode=decode), hash_shards=sha256)
        for shard in range(plan.shard_count("train")):
            packer.pack(plan, source, PackTask("train", shard), ignore_progress)

    return write


def ignore_progress(progress: PackProgress) -> None: ...


def webdataset_writer(plan: ShardPlan, source: Originals) -> Writer:
    import webdataset

    def write(out: Path) -> None:
        with webdataset.ShardWriter(str(out / "%05d.tar"), maxsize=SHARD_BYTES, verbose=0) as writer:
            for entry in entries(plan):
                writer.write({"__key__": f"{entry.key:08d}", "jpg": source.read(entry.item), "cls": entry.label})

    return write


def mds_writer(plan: ShardPlan, source: Originals, hashes: list[str]) -> Writer:
    from streaming import MDSWriter

    columns = {"image": "bytes", "label": "int"}

    def write(out: Path) -> None:
        with MDSWriter(out=str(out), columns=columns, size_limit=SHARD_BYTES, hashes=hashes) as writer:
            for entry in entries(plan):
                writer.write({"image": source.read(entry.item), "label": entry.label})

    return write


def all_writers(plan: ShardPlan, source: Originals, data: DataSection, scratch: Path) -> dict[str, Writer]:
    """Return the available writers by name; plain copies have names with the prefix `limit: `."""
    writers: dict[str, Writer] = {}
    for decode, sha256 in ((False, False), (False, True), (True, False), (True, True)):
        name = f"podscale: {'strict validation' if decode else 'copy'}{', sha256 of shards' if sha256 else ''}"
        writers[name] = podscale_writer(plan, source, data, decode=decode, sha256=sha256)
    others: dict[str, Callable[[], Writer]] = {
        "webdataset: ShardWriter": lambda: webdataset_writer(plan, source),
        "mosaicml-streaming: MDSWriter": lambda: mds_writer(plan, source, []),
        "mosaicml-streaming: MDSWriter, sha256 of shards": lambda: mds_writer(plan, source, ["sha256"]),
    }
    for name, build in others.items():
        try:
            writers[name] = build()
        except ImportError as error:
            print(f"{name}: not measured ({error})", file=sys.stderr)
    return writers | plain_writers(plan, source, direct=supports_direct(scratch))


def supports_direct(folder: Path) -> bool:
    """Try O_DIRECT on the file system, which tmpfs may not support."""
    with TemporaryFile(dir=folder) as file:
        try:
            os.close(os.open(f"/proc/self/fd/{file.fileno()}", os.O_WRONLY | os.O_DIRECT))
        except OSError as error:
            print(f"O_DIRECT: not measured ({error.strerror})", file=sys.stderr)
            return False
    return True


def plain_writers(plan: ShardPlan, source: Originals, *, direct: bool) -> dict[str, Writer]:
    """Return writers that only copy the planned images, by system calls."""
    ranges = [(entry.item.offset, entry.item.size) for entry in entries(plan)]
    total = sum(size for _, size in ranges)
    largest = max(size for _, size in ranges)

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

    def read_write(archive: int, target: int) -> None:
        buffer = memoryview(mmap.mmap(-1, WRITE_BYTES + largest + PAGE_BYTES))  # aligned to pages, for O_DIRECT
        filled = 0
        for offset, size in ranges:
            filled += os.preadv(archive, [buffer[filled : filled + size]], offset)
            while filled >= WRITE_BYTES:
                os.write(target, buffer[:WRITE_BYTES])
                filled -= WRITE_BYTES
                buffer[:filled] = buffer[WRITE_BYTES : WRITE_BYTES + filled]
        os.write(target, buffer[: -(-filled // PAGE_BYTES) * PAGE_BYTES])

    def sendfile(archive: int, target: int) -> None:
        for offset, size in ranges:
            for sent in range(0, size, 2**30):
                os.sendfile(target, archive, offset + sent, min(size - sent, 2**30))

    def copy_file_range(archive: int, target: int) -> None:
        for offset, size in ranges:
            os.copy_file_range(archive, target, size, offset)

    def read_only(archive: int, target: int) -> None:
        for offset, size in ranges:
            os.pread(archive, size, offset)

    writers = {
        "limit: read alone": into_file(read_only),
        "limit: read, write by the megabyte": into_file(read_write),
        "limit: sendfile": into_file(sendfile),
        "limit: copy_file_range": into_file(copy_file_range),
    }
    if direct:
        writers["limit: read, write by the megabyte with O_DIRECT"] = into_file(read_write, os.O_DIRECT)
    return writers
