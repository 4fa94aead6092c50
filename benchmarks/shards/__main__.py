"""Sharding speed: images per CPU-second against other writers, and the cost of a plan of a million images.

    python -m benchmarks.shards --images imagenet-500.tar

The archive holds original ImageNet JPEGs in one folder (name: <synset>_<anything>.JPEG). The other writers are measured
if they can be imported: `webdataset` and `mosaicml-streaming`. The latter pins versions that clash with ours, so
install both into a virtual environment of their own that sees Podscale's packages too: make one, put a .pth file with
the path of Podscale's site-packages into its site-packages, `pip install webdataset mosaicml-streaming transformers`,
and run this module with its python.

All figures are CPU time (user + system, of this process and its children), which other load on the machine disturbs
little; every writer gets the same bytes from the same reader in the same order, one process, rounds interleaved.
"""

import shutil
import statistics
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.conditions import head
from benchmarks.harness import Options, write_results
from benchmarks.measure import cpu_seconds, median_ratio, rate
from benchmarks.samples import write_archive
from benchmarks.shards.costs import pack_memory, plan_cost
from benchmarks.shards.sources import Originals, entries
from benchmarks.shards.writers import SHARD_BYTES, Writer, all_writers
from podscale.config.data import DataSection
from podscale.data.sharding.shard_plan import plan_shards

PACKAGES = ("numpy", "simplejpeg", "xxhash", "webdataset", "mosaicml-streaming")
HEADING = [
    "| writer | images per CPU-s (median) | lowest .. highest | MB per CPU-s | x webdataset |",
    "|---|---:|---:|---:|---:|",
]
LIMITS = "limit: "
LIMITS_TEXT = (
    "A copy by `sendfile` or `copy_file_range` inside the kernel (one call a member) is dearer than reading and "
    "writing a megabyte at a time: it goes through the page cache page by page. Writes of 2 MiB cost more than those "
    "of 1 MiB on the kernel this was made on, so a shard is written in pieces of 1 MiB that begin at multiples of it. "
    "`O_DIRECT` can be cheaper (it spares the page cache) but varies most, and leaves no warm shards for the training "
    "that starts next, so Podscale does not use it. What Podscale adds to reading and writing is xxh3-128 (some 6 us "
    "an image) and Python (some 10 us: tar headers, header scan, index rows)."
)


@dataclass
class Rates:
    """Images and megabytes per CPU-second of one writer, round by round."""

    images: list[float] = field(default_factory=list)
    megabytes: list[float] = field(default_factory=list)


def measure(writers: dict[str, Writer], images: int, size: int, rounds: int, scratch: Path) -> dict[str, Rates]:
    """Rates of all writers in turn. Args: images, size: written by each, size in bytes."""
    found = {name: Rates() for name in writers}
    for number in range(rounds + 1):
        for name, write in writers.items():
            out = scratch / "out"
            out.mkdir()
            before = cpu_seconds() + cpu_seconds(children=True)
            write(out)
            seconds = cpu_seconds() + cpu_seconds(children=True) - before
            shutil.rmtree(out)
            if number:  # the first round warms caches and imports
                found[name].images.append(rate(images, seconds))
                found[name].megabytes.append(rate(size / 1e6, seconds))
                print(f"{name:<60} {found[name].images[-1]:>9,.0f} images/CPU-s", file=sys.stderr)
    return found


def write_speed(archive: Path, repeat: int, rounds: int, scratch: Path) -> tuple[list[str], list[str], str]:
    """Table of writers, that of limits, and a sentence on what was written."""
    data = DataSection(source=str(archive), shard_bytes=SHARD_BYTES)
    source = Originals(archive, repeat + 1)
    plan = plan_shards(source, data)
    chosen = list(entries(plan))
    size = sum(entry.item.size for entry in chosen)
    found = measure(all_writers(plan, source, data, scratch), len(chosen), size, rounds, scratch)
    base = next((rates for name, rates in found.items() if name.startswith("webdataset")), None)
    writers = [row(name, rates, base) for name, rates in found.items() if not name.startswith(LIMITS)]
    limits = [row(name, rates, base) for name, rates in found.items() if name.startswith(LIMITS)]
    written = f"{len(chosen):,} images, {size / 1e6:,.0f} MB, {rounds} rounds after one to warm up"
    return [*HEADING, *writers], [*HEADING, *limits], written


def row(name: str, rates: Rates, base: Rates | None) -> str:
    """Row of a writer; its ratio is taken within each round, when both had the same load beside them."""
    ratio = f"{median_ratio(rates.images, base.images):.2f}" if base else "-"
    spread = f"{min(rates.images):,.0f} .. {max(rates.images):,.0f}"
    return (
        f"| {name.removeprefix(LIMITS)} | {statistics.median(rates.images):,.0f} | {spread} "
        f"| {statistics.median(rates.megabytes):,.0f} | {ratio} |"
    )


def page(speed: list[str], limits: list[str], written: str, plan: list[str], memory: list[str]) -> list[str]:
    """The page below its head."""
    return [
        "## Writing shards",
        "",
        f"Original ImageNet JPEGs: {written}. CPU time is user + system, one process, page-cache hot, all writers in "
        "turn. Every podscale row includes the header scan, the xxh3-128 of each image and fsync; strict validation "
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
        LIMITS_TEXT,
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


def main() -> None:
    parser = Options(__doc__)
    parser.add_argument("--images", type=Path, help="archive of original ImageNet JPEGs")
    parser.add_size("--repeat", full=4, small=1, type=int, help="copies of each image that are written")
    parser.add_size("--rounds", full=5, small=1, type=int)
    parser.add_size("--entries", full=1_000_000, small=20_000, type=int, help="images of the synthetic plan")
    parser.add_argument("--scratch", type=Path, help="directory to write to (default: a temporary one)")
    options = parser.read()
    if options.images is None and not options.small:
        parser.error("--images: say where the archive of original JPEGs is")
    lines = head("Sharding", PACKAGES)
    with tempfile.TemporaryDirectory(dir=options.scratch) as directory:
        scratch = Path(directory)
        images = (options.images or write_archive(scratch / "generated.tar", images=16)).resolve()
        speed, limits, written = write_speed(images, options.repeat, options.rounds, scratch)
        plan = plan_cost(options.entries, scratch)
        memory = pack_memory(images, (1,) if options.small else (1, 4, 16), scratch)
    write_results(options.results, "shards.md", [*lines, *page(speed, limits, written, plan, memory)])


if __name__ == "__main__":
    main()
