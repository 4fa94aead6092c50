"""Images per core of input without accelerated decoding, with and without caches, and its time by operation.

    podscale shard <document> && python -m benchmarks.input_host SHARD_SET... [--images 500] [--rounds 5] [--size 224]

Loaders run in turn, round by round, pinned to one core with one thread and then to two with two. Values are medians
over the rounds; ratios are taken within a round. CPU time is user + system of all threads of the process, so other load
matters little. All loaders but DALI return the same pixels, which is checked first. Parts: decode.py (loaders, and the
time of each operation), transfer.py (reading records for the first time).
"""

import os
import tempfile
from pathlib import Path

from benchmarks.conditions import head
from benchmarks.harness import Options, write_results
from benchmarks.input_host.decode import BATCH, NEEDED_RATE, loader_rows, operation_table
from benchmarks.input_host.transfer import transfer
from benchmarks.samples import make_shards
from podscale.data.shard_set import ShardSet

PACKAGES = ("pillow", "simplejpeg", "numpy", "nvidia-dali-cuda130")
READING = """`baseline` decodes the whole image into new memory; NumPy crops and flips it. Pixels are equal in all rows
but DALI's. `records in memory` has no effect here, since the page cache holds the shards: it is for shards behind a URL
or on a slow volume (last table)."""


def main() -> None:
    parser = Options(__doc__)
    parser.add_argument("shard_sets", nargs="*", metavar="SHARD_SET")
    parser.add_size("--images", full=500, small=BATCH, type=int, help="images of a measurement")
    parser.add_size("--rounds", full=5, small=1, type=int)
    parser.add_size("--size", full=224, small=32, type=int)
    parser.add_size("--pause", full=0.02, small=0.001, type=float, help="latency of the store, seconds")
    options = parser.read()
    if not options.shard_sets and not options.small:
        parser.error("SHARD_SET: missing. Give the shard sets to read.")
    if options.images < BATCH:
        parser.error(f"--images: less than a batch (got {options.images}). Give {BATCH} or more.")
    lines = head("Input on hosts: images per core", PACKAGES)
    with tempfile.TemporaryDirectory() as scratch:
        sets = options.shard_sets or [str(make_shards(Path(scratch), images=2 * BATCH))]
        for directory in sets:
            lines += shard_set_tables(directory, options.images, options.rounds, options.size)
        lines += transfer(sets[0], options.pause)
    write_results(options.results, "input-host.md", [*lines, READING])


def shard_set_tables(directory: str, images: int, rounds: int, size: int) -> list[str]:
    """Return the tables of one shard set: loaders on one core and on two, and time by operation."""
    split = ShardSet.open(directory).split("train")
    lines = [
        f"{len(split):,} images of {split.column('size').mean() / 1000:.1f} kB, {size} px:",
        "",
        f"| cores, threads | loader | images per CPU-second | ratio | cores for {NEEDED_RATE:,} images/s |",
        "|---:|---|---:|---:|---:|",
    ]
    allowed = os.sched_getaffinity(0)
    try:
        for number in range(1, min(len(allowed), 2) + 1):
            os.sched_setaffinity(0, sorted(allowed)[:number])
            lines += loader_rows(directory, number, images, rounds, size)
    finally:
        os.sched_setaffinity(0, allowed)
    return [*lines, "", *operation_table(directory, min(images, 200), size)]


if __name__ == "__main__":
    main()
