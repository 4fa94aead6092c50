"""Sharding speed: images per CPU-second against other writers, and the cost of a plan of a million images.

Run:  python benchmarks/shards.py --images imagenet-500.tar

The archive holds original ImageNet JPEGs in one folder (name: <synset>_<anything>.JPEG). The other writers are measured
where they can be imported: `webdataset` and `mosaicml-streaming`. The latter pins versions that clash with ours, so
install both into a virtual environment of their own that sees Podscale's packages too: make one, put a .pth file with
the path of Podscale's site-packages into its site-packages, `pip install webdataset mosaicml-streaming transformers`,
and run this file with its python.

All figures are CPU time (user + system, of this process and its children), which other load on the machine disturbs
little; every writer gets the same bytes from the same reader in the same order, one process, rounds interleaved.
"""

import argparse
import mmap
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from conditions import RESULTS, head, publish

from podscale.config.data import DataSection
from podscale.data.sharding.pack import Packer, PackTask
from podscale.data.sharding.pack_progress import PackProgress
from podscale.data.sharding.shard_plan import ShardPlan, plan_shards
from podscale.data.sharding.validate_image import ImageRules
from podscale.data.sources import SourceItem
from podscale.data.sources.storage import LocalStorage
from podscale.data.sources.tar import tar_members

SHARD_BYTES = 256 * 2**20


def cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def peak_kilobytes() -> int:
    """Largest resident size of this process (getrusage would count that of the process that started it)."""
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])


class Originals:
    """The images of one flat archive, each `repeat` times, by synset."""

    def __init__(self, archive: Path, repeat: int) -> None:
        self.archive, self._storage, self._repeat = archive, LocalStorage(str(archive)), repeat

    def items(self) -> Iterator[SourceItem]:
        with self._storage.open(b"") as file:
            for member in tar_members(file, "archive"):
                synset = member.name.rpartition(b"/")[2].partition(b"_")[0].decode()
                for copy in range(self._repeat):
                    # every synset in both splits, so that it is a data set; only train is packed here
                    split = "validation" if copy == 0 else "train"
                    yield SourceItem(b"%d/" % copy + member.name, synset, member.size, split, b"", member.offset)

    def read(self, item: SourceItem) -> bytes:
        return self._storage.read(b"", item.offset, item.size)


class Synthetic:
    """A listing like ImageNet's, of files that are nowhere."""

    def __init__(self, count: int) -> None:
        self._count = count

    def items(self) -> Iterator[SourceItem]:
        for i in range(self._count):
            synset = f"n{i % 1000 * 7919:08d}"
            yield SourceItem(f"train/{synset}/{synset}_{i}.JPEG".encode(), synset, 60_000 + i * 31 % 100_000)

    def read(self, item: SourceItem) -> bytes:
        raise OSError("nowhere")


Writer = Callable[[Path], None]


def podscale_writer(plan: ShardPlan, source: Originals, data: DataSection, *, decode: bool, sha256: bool) -> Writer:
    def write(out: Path) -> None:
        for name in ("train", "records/train"):
            (out / name).mkdir(parents=True)
        packer = Packer(out, data, replace(ImageRules.from_section(data), decode=decode), hash_shards=sha256)
        for shard in range(plan.shard_count("train")):
            packer.pack(plan, source, PackTask("train", shard), ignore)

    return write


def ignore(progress: PackProgress) -> None:
    return None


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


def entries(plan: ShardPlan) -> Iterator[Any]:
    for shard in range(plan.shard_count("train")):
        yield from plan.entries("train", shard)


@dataclass
class Figure:
    name: str
    images: list[float]
    megabytes: list[float]


def measure(writers: dict[str, Writer], images: int, size: int, rounds: int, scratch: Path) -> list[Figure]:
    figures = {name: Figure(name, [], []) for name in writers}
    for number in range(rounds + 1):
        for name, write in writers.items():
            out = scratch / "out"
            out.mkdir()
            before = cpu_seconds()
            write(out)
            seconds = cpu_seconds() - before
            shutil.rmtree(out)
            if number:  # the first round warms caches and imports
                figures[name].images.append(images / seconds)
                figures[name].megabytes.append(size / 1e6 / seconds)
                print(f"{name:<60} {images / seconds:>9,.0f} images/CPU-s", file=sys.stderr)
    return list(figures.values())


LIMITS_TEXT = [
    "A copy by `sendfile` or `copy_file_range` inside the kernel (one call a member) is dearer than reading and "
    "writing a megabyte at a time: it goes through the page cache page by page. Writes of 2 MiB cost more than those "
    "of 1 MiB on the kernel this was made on, so a shard is written in pieces of 1 MiB that begin at multiples of it. "
    "`O_DIRECT` can be cheaper (it spares the page cache) but varies most, and leaves no warm shards for the training "
    "that starts next, so Podscale does not use it. What Podscale adds to reading and writing is xxh3-128 (some 6 us "
    "an image) and Python (some 10 us: tar headers, header scan, index rows)."
]


def plain_writers(plan: ShardPlan, source: Originals) -> dict[str, Writer]:
    """The least that copying the planned images can cost, by ways to do it."""
    places = [(entry.item.offset, entry.item.size) for entry in entries(plan)]
    total = sum(size for _, size in places)

    def into_file(copy: Callable[[int, int], None], flags: int = 0) -> Writer:
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
        buffer = memoryview(mmap.mmap(-1, 2**24))  # aligned to pages, as O_DIRECT asks
        filled = 0
        for offset, size in places:
            filled += os.preadv(archive, [buffer[filled : filled + size]], offset)
            while filled >= 2**20:
                os.write(target, buffer[: 2**20])
                filled -= 2**20
                buffer[:filled] = buffer[2**20 : 2**20 + filled]

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

    return {
        "limit: read alone": into_file(read),
        "limit: read, write by the megabyte": into_file(megabytes),
        "limit: sendfile": into_file(sendfile),
        "limit: copy_file_range": into_file(copy_file_range),
        "limit: read, write by the megabyte with O_DIRECT": into_file(megabytes, os.O_DIRECT),
    }


def write_speed(archive: Path, repeat: int, rounds: int, scratch: Path) -> tuple[list[str], list[str], str]:
    """The table of writers, that of limits, and what was written."""
    data = DataSection(source=str(archive), shard_bytes=SHARD_BYTES)
    source = Originals(archive, repeat + 1)
    plan = plan_shards(source, data)
    chosen = list(entries(plan))
    size = sum(entry.item.size for entry in chosen)
    writers = {}
    for decode, sha256 in ((False, False), (False, True), (True, False), (True, True)):
        name = f"podscale: {'strict validation' if decode else 'copy'}{', sha256 of shards' if sha256 else ''}"
        writers[name] = podscale_writer(plan, source, data, decode=decode, sha256=sha256)
    for name, make in (
        ("webdataset: ShardWriter", lambda: webdataset_writer(plan, source)),
        ("mosaicml-streaming: MDSWriter", lambda: mds_writer(plan, source, [])),
        ("mosaicml-streaming: MDSWriter, sha256 of shards", lambda: mds_writer(plan, source, ["sha256"])),
    ):
        try:
            writers[name] = make()
        except ImportError as error:
            print(f"{name}: not measured ({error})", file=sys.stderr)
    writers |= plain_writers(plan, source)
    figures = measure(writers, len(chosen), size, rounds, scratch)
    other = next((f for f in figures if f.name.startswith("webdataset")), None)
    rows = {True: [], False: []}
    for figure in figures:
        median = statistics.median(figure.images)
        # within each round, where both had the same load beside them
        ratios = [own / base for own, base in zip(figure.images, other.images, strict=True)] if other else []
        ratio = f"{statistics.median(ratios):.2f}" if ratios else "-"
        spread = f"{min(figure.images):,.0f} .. {max(figure.images):,.0f}"
        megabytes = statistics.median(figure.megabytes)
        rows[figure.name.startswith("limit")].append(
            f"| {figure.name.removeprefix('limit: ')} | {median:,.0f} | {spread} | {megabytes:,.0f} | {ratio} |"
        )
    heading = ["| writer | images per CPU-s (median) | lowest .. highest | MB per CPU-s | x webdataset |"]
    heading.append("|---|---:|---:|---:|---:|")
    tables = [*heading, *rows[False]], [*heading, *rows[True]]
    return *tables, f"{len(chosen):,} images, {size / 1e6:,.0f} MB, {rounds} rounds after one to warm up"


def plan_cost(count: int, scratch: Path) -> list[str]:
    """Wall seconds, peak memory and file size of a plan, each in a fresh process."""
    script = (
        "import sys, pathlib; sys.path.insert(0, sys.argv[1]); import shards\n"
        "from podscale.config.data import DataSection\n"
        "from podscale.data.sharding.shard_plan import make_plan\n"
        "base = shards.peak_kilobytes()\n"
        "plan = make_plan(shards.Synthetic(int(sys.argv[2])), DataSection(source='synthetic'))\n"
        "plan.write(pathlib.Path(sys.argv[3]))\n"
        "print(base, shards.peak_kilobytes(), plan.shards('train'))\n"
    )
    lines = [
        "| images | wall s | CPU s | peak memory MB (of it imports) | plan file MB |",
        "|---:|---:|---:|---:|---:|",
    ]
    for images in (count // 10, count):
        path = scratch / "plan"
        wall, cpu = time.monotonic(), cpu_seconds()
        command = [sys.executable, "-c", script, str(Path(__file__).parent), str(images), str(path)]
        base, peak, _ = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        wall, cpu = time.monotonic() - wall, cpu_seconds() - cpu
        size = path.stat().st_size / 1e6
        memory = f"{int(peak) / 1e3:.0f} ({int(base) / 1e3:.0f})"
        lines.append(f"| {images:,} | {wall:.1f} | {cpu:.1f} | {memory} | {size:.0f} |")
    return lines


def pack_memory(archive: Path, scratch: Path) -> list[str]:
    """Peak memory of planning and packing more and more images, each in a fresh process."""
    script = (
        "import sys, pathlib; sys.path.insert(0, sys.argv[1]); import shards\n"
        "from podscale.config.data import DataSection\n"
        "from podscale.data.sharding.shard_plan import make_plan\n"
        "repeat, out = int(sys.argv[3]), pathlib.Path(sys.argv[4])\n"
        "source = shards.Originals(sys.argv[2], repeat + 1)\n"
        "data = DataSection(source='x', shard_bytes=64 * 2**20)\n"
        "plan = make_plan(source, data)\n"
        "out.mkdir(); shards.podscale_writer(plan, source, data, decode=True, sha256=True)(out)\n"
        "print(shards.peak_kilobytes(), plan.shards('train'))\n"
    )
    lines = ["| images packed | shards | peak memory MB |", "|---:|---:|---:|"]
    for repeat in (1, 4, 16):
        command = [
            sys.executable,
            "-c",
            script,
            str(Path(__file__).parent),
            str(archive),
            str(repeat),
            str(scratch / "m"),
        ]
        peak, shards = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        shutil.rmtree(scratch / "m")
        lines.append(f"| {500 * repeat:,} | {shards} | {int(peak) / 1e3:.0f} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, required=True, help="archive of original ImageNet JPEGs")
    parser.add_argument("--repeat", type=int, default=4, help="how often each image is written")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--entries", type=int, default=1_000_000, help="images of the synthetic plan")
    parser.add_argument("--scratch", type=Path, help="directory to write to (default: a temporary one)")
    parser.add_argument("--results", type=Path, default=RESULTS / "shards.md")
    options = parser.parse_args()
    text = head("Sharding", ["numpy", "simplejpeg", "xxhash", "webdataset", "mosaicml-streaming"])
    with tempfile.TemporaryDirectory(dir=options.scratch) as directory:
        scratch = Path(directory)
        speed, limits, conditions = write_speed(options.images, options.repeat, options.rounds, scratch)
        plan = plan_cost(options.entries, scratch)
        memory = pack_memory(options.images, scratch)
    text += [
        "## Writing shards",
        "",
        f"Original ImageNet JPEGs: {conditions}. CPU time is user + system, one process, page-cache hot, all "
        "writers in turn. Every podscale row includes the header scan, the xxh3-128 of each image and fsync; "
        "strict validation "
        "decodes all entropy data.",
        "",
        *speed,
        "",
        "## What limits a copy",
        "",
        "The same bytes in the same order, read from the page cache and written to one file of the same file system by "
        "the least code there is: no header, no hash, no index. The rounds are those of the table above.",
        "",
        *limits,
        "",
        *LIMITS_TEXT,
        "",
        "## Planning",
        "",
        "A synthetic listing (names like ImageNet's), from listing to the file on disk, a fresh process each.",
        "",
        *plan,
        "",
        "## Memory of packing",
        "",
        "Planning and packing with validation and hashes in one fresh process each; 64 MiB shards.",
        "",
        *memory,
        "",
    ]
    publish(options.results, text)


if __name__ == "__main__":
    main()
