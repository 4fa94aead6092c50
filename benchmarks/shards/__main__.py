"""Sharding speed: images per CPU-second against other writers, and the cost of a plan of a million images.

    python -m benchmarks.shards --images imagenet-500.tar

The archive has original ImageNet JPEGs in one folder (<synset>_<anything>.JPEG). Other writers are measured if they are
installed: `webdataset` and `mosaicml-streaming`. The latter pins versions that conflict with ours. So create a virtual
environment, add a .pth file with the path of Podscale's site-packages to its site-packages, `pip install webdataset
mosaicml-streaming transformers`, and run this module with its python.

Times are CPU time (user + system, of this process and its children), which other load on the machine affects little.
Every writer gets the same bytes in the same order, in one process; rounds are interleaved.
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
from benchmarks.shards.writers import SHARD_BYTES, Originals, Writer, all_writers, entries
from podscale.config.data import DataSection
from podscale.data.sharding.shard_plan import plan_shards

PACKAGES = ("numpy", "simplejpeg", "xxhash", "webdataset", "mosaicml-streaming")
HEADING = [
    "| writer | images per CPU-s (median) | lowest .. highest | MB per CPU-s | x webdataset |",
    "|---|---:|---:|---:|---:|",
]
LIMITS = "limit: "
LIMITS_TEXT = (
    "A copy by `sendfile` or `copy_file_range` (one call a member) costs more than reading and writing a megabyte at a "
    "time, because the kernel copies page by page. Writes of 2 MiB cost more than writes of 1 MiB on this kernel, so a "
    "shard is written in aligned pieces of 1 MiB. `O_DIRECT` can cost less (no page cache) but varies most, and leaves "
    "no cached shards for the training that follows, so Podscale does not use it. Podscale adds to reading and writing "
    "xxh3-128 (about 6 us an image) and Python (about 10 us: tar headers, header scan, index rows)."
)


@dataclass
class Rates:
    """Images and megabytes per CPU-second of one writer, round by round."""

    images: list[float] = field(default_factory=list)
    megabytes: list[float] = field(default_factory=list)


def measure(writers: dict[str, Writer], images: int, size: int, rounds: int, scratch: Path) -> dict[str, Rates]:
    """Return the rates of all writers, which write `images` images of `size` bytes in all."""
    rates = {name: Rates() for name in writers}
    for number in range(rounds + 1):
        for name, write in writers.items():
            out = scratch / "out"
            out.mkdir()
            start = cpu_seconds() + cpu_seconds(children=True)
            write(out)
            seconds = cpu_seconds() + cpu_seconds(children=True) - start
            shutil.rmtree(out)
            if number:  # the first round warms caches and imports
                rates[name].images.append(rate(images, seconds))
                rates[name].megabytes.append(rate(size / 1e6, seconds))
                print(f"{name:<60} {rates[name].images[-1]:>9,.0f} images/CPU-s", file=sys.stderr)
    return rates


def write_speed(archive: Path, repeat: int, rounds: int, scratch: Path) -> tuple[list[str], list[str], str]:
    """Return the table of writers, the table of plain copies, and a description of the images."""
    data = DataSection(source=str(archive), shard_bytes=SHARD_BYTES)
    source = Originals(archive, repeat + 1)
    plan = plan_shards(source, data)
    images = list(entries(plan))
    size = sum(entry.item.size for entry in images)
    rates = measure(all_writers(plan, source, data, scratch), len(images), size, rounds, scratch)
    base = next((writer for name, writer in rates.items() if name.startswith("webdataset")), None)
    writers = [row(name, writer, base) for name, writer in rates.items() if not name.startswith(LIMITS)]
    limits = [row(name, writer, base) for name, writer in rates.items() if name.startswith(LIMITS)]
    description = f"{len(images):,} images, {size / 1e6:,.0f} MB, {rounds} rounds after a warm-up"
    return [*HEADING, *writers], [*HEADING, *limits], description


def row(name: str, rates: Rates, base: Rates | None) -> str:
    """Return the row of a writer; ratios are taken within a round, so that other load affects both alike."""
    ratio = f"{median_ratio(rates.images, base.images):.2f}" if base else "-"
    spread = f"{min(rates.images):,.0f} .. {max(rates.images):,.0f}"
    return (
        f"| {name.removeprefix(LIMITS)} | {statistics.median(rates.images):,.0f} | {spread} "
        f"| {statistics.median(rates.megabytes):,.0f} | {ratio} |"
    )


def page(speed: list[str], limits: list[str], description: str, plan: list[str], memory: list[str]) -> list[str]:
    """Return the page below its head."""
    return [
        "## Writing shards",
        "",
        f"Original ImageNet JPEGs: {description}. CPU time is user + system, one process, from the page cache, all "
        "writers in turn. Every podscale row includes the header scan, the xxh3-128 of each image and fsync; strict "
        "validation decodes all entropy data.",
        "",
        *speed,
        "",
        "## Limits of a copy",
        "",
        "The same bytes in the same order, read from the page cache and written to one file of the same file system, "
        "without headers, hashes and index, in the same rounds.",
        "",
        *limits,
        "",
        LIMITS_TEXT,
        "",
        "## Planning",
        "",
        "A synthetic listing (names like ImageNet's), from listing to the file on disk, in a new process.",
        "",
        *plan,
        "",
        "## Memory of packing",
        "",
        "Planning and packing with validation and hashes in a new process; 64 MiB shards.",
        "",
        *memory,
        "",
    ]


def main() -> None:
    parser = Options(__doc__)
    parser.add_argument("--images", type=Path, help="archive of original ImageNet JPEGs")
    parser.add_size("--repeat", full=4, small=1, type=int, help="copies of each image")
    parser.add_size("--rounds", full=5, small=1, type=int)
    parser.add_size("--entries", full=1_000_000, small=20_000, type=int, help="images of the synthetic plan")
    parser.add_argument("--scratch", type=Path, help="directory to write to (default: a temporary one)")
    options = parser.read()
    if options.images is None and not options.small:
        parser.error("--images: missing. Give the archive of original JPEGs.")
    lines = head("Sharding", PACKAGES)
    with tempfile.TemporaryDirectory(dir=options.scratch) as directory:
        scratch = Path(directory)
        images = (options.images or write_archive(scratch / "generated.tar", images=16)).resolve()
        speed, limits, description = write_speed(images, options.repeat, options.rounds, scratch)
        plan = plan_cost(options.entries, scratch)
        memory = pack_memory(images, (1,) if options.small else (1, 4, 16), scratch)
    write_results(options.results, "shards.md", [*lines, *page(speed, limits, description, plan, memory)])


if __name__ == "__main__":
    main()
