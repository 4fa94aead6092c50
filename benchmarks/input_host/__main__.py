"""Input on a host without accelerated decoding: images per core, with each cache and without, and where time goes.

    podscale shard <document> && python -m benchmarks.input_host SHARD_SET... [--images 500] [--rounds 5] [--size 224]

Candidates take turns, round by round, pinned to one core with one thread and then to two with two; figures are medians
over the rounds, ratios the medians of each round's. CPU time is user + system of all threads of the process, so that
other load matters little. All candidates but DALI are first shown to hand over the same pixels. Parts: candidates.py,
decoding.py (microseconds of an image), transfer.py (records into memory).
"""

import os
import tempfile
from pathlib import Path

from benchmarks.conditions import head
from benchmarks.harness import Options, write_results
from benchmarks.input_host.candidates import BATCH, NEEDED, loaders
from benchmarks.input_host.decoding import parts
from benchmarks.input_host.transfer import transfer
from benchmarks.samples import make_shards
from podscale.data.shard_set import ShardSet

PACKAGES = ("pillow", "simplejpeg", "numpy", "nvidia-dali-cuda130")
READING = """`as it was` is the loader before: the whole image decoded into fresh memory, the rectangle copied out and
mirrored by NumPy. Pixels are the same to the bit in all rows but DALI's. `records in memory` costs and gains nothing
here, where the page cache holds the shards: it is for shards behind a URL or on a slow volume (last table)."""


def main() -> None:
    parser = Options(__doc__)
    parser.add_argument("shard_sets", nargs="*", metavar="SHARD_SET")
    parser.add_size("--images", full=500, small=BATCH, type=int, help="images of one measurement")
    parser.add_size("--rounds", full=5, small=1, type=int)
    parser.add_size("--size", full=224, small=32, type=int)
    parser.add_size("--pause", full=0.02, small=0.001, type=float, help="seconds until the store answers")
    options = parser.read()
    if not options.shard_sets and not options.small:
        parser.error("SHARD_SET: say which shard sets to read")
    if options.images < BATCH:
        parser.error(f"--images: a measurement takes whole batches (got {options.images}). Give {BATCH} or more.")
    lines = head("Input on hosts: images per core", PACKAGES)
    with tempfile.TemporaryDirectory() as scratch:
        sets = options.shard_sets or [str(make_shards(Path(scratch), images=2 * BATCH))]
        for directory in sets:
            lines += of_set(directory, options.images, options.rounds, options.size)
        lines += transfer(sets[0], options.pause)
    write_results(options.results, "input-host.md", [*lines, READING])


def of_set(directory: str, images: int, rounds: int, size: int) -> list[str]:
    """Tables of one shard set: candidates on one core and on two, parts of an image's time."""
    split = ShardSet.open(directory).split("train")
    lines = [
        f"{len(split):,} images of {split.column('size').mean() / 1000:.1f} kB, {size} px:",
        "",
        f"| cores, threads | loader | images per CPU-second | ratio | cores for {NEEDED:,} images/s |",
        "|---:|---|---:|---:|---:|",
    ]
    allowed = os.sched_getaffinity(0)
    try:
        for number in range(1, min(len(allowed), 2) + 1):
            os.sched_setaffinity(0, sorted(allowed)[:number])
            lines += loaders(directory, number, images, rounds, size)
    finally:
        os.sched_setaffinity(0, allowed)
    return [*lines, "", *parts(directory, min(images, 200), size)]


if __name__ == "__main__":
    main()
