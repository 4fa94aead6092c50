"""Decoded cache of a node: one for each of its processes, or the same bytes shared by all.

    podscale shard <document> && python -m benchmarks.shared_cache SHARD_SET... [--images 8000] [--processes 2 8]

Two parts. Hit rates: the real sample order of images of equal size, counted without decoding. Rates: the processes of a
node read the shard set with the loader native, which keeps coefficients. The nodes with different caches are open at
the same time and take turns in every round, each after epochs that fill its cache. CPU time is user + system of all
processes of a node (getrusage). The images of a batch are compared first.
"""

import hashlib
import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.conditions import head
from benchmarks.harness import Options, exit_unavailable, write_results
from benchmarks.measure import cpu_seconds, median_ratio, rate
from benchmarks.samples import make_shards, require_native
from podscale.config.run_config import RunConfig
from podscale.data.loaders.build_loader import build_loader, open_shard_set
from podscale.data.native import CropDecoder, can_share_images
from podscale.data.sampler import Sampler, build_sampler
from podscale.data.shard_set import ShardSet
from podscale.errors import InputError
from podscale.training.schedules import image_phases
from podscale.util import env
from podscale.util.shared_memory import shared_memory

SHARDS, STEPS = 64, 16
"""Shards, and steps of an epoch, of the hit rates."""
EPOCHS = (2, 5, 10)
RANKS = (1, 2, 4, 8)
FILL_EPOCHS = 8
"""Epochs before the first measurement; after them all caches are full."""
PARTS = {"all images": 1.0, "half of the images": 0.5}
"""Images that fit into the bytes of all processes together."""
OWN, SHARED, NONE = "a cache for each process", "one cache for all", "no cache"
PACKAGES = ("pillow", "numpy")
READING = f"""Nothing is evicted, so a cache that is full has the same hit rate in all later epochs. `global` gives a
rank other images in every epoch. So does `blocked` within the images of its host. {FILL_EPOCHS} epochs fill the caches
before the rates are measured. A median ratio is of the same round, so it is not the ratio of the medians."""


@dataclass(frozen=True)
class Table:
    """Columns that the sampler reads."""

    shards: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.shards)

    def column(self, name: str) -> npt.NDArray[np.int64]:
        assert name == "shard"
        return self.shards


def sample_order(order: str, hosts: int, images: int) -> Sampler:
    section = {"order": order, "groups": 8 if order == "blocked" else 1}
    document = {"input": section, "train": {"global_batch": images // STEPS}, "launch": {"nodes": hosts}}
    table = Table(np.repeat(np.arange(SHARDS), images // SHARDS))
    return build_sampler(RunConfig.model_validate(document), table)


def hit_rates(batches: Sequence[Sequence[npt.NDArray[np.int64]]], capacity: int, *, shared: bool) -> list[float]:
    """Return the hit rate of the processes of a host in each of EPOCHS.

    Args:
        batches: rows of each process in each step, int64 [n].
        capacity: images that the cache of one process holds.
        shared: the processes share the bytes of their caches.
    """
    ranks = len(batches[0])
    kept = np.zeros((1 if shared else ranks, 1 + max(int(rows.max()) for step in batches for rows in step)), dtype=bool)
    limit, rates = capacity * (ranks if shared else 1), []
    for epoch in range(max(EPOCHS)):
        hits = reads = 0
        for step in batches[epoch * STEPS : (epoch + 1) * STEPS]:
            for rank, rows in enumerate(step):
                cache = kept[0 if shared else rank]
                missing = rows[~cache[rows]]
                hits, reads = hits + len(rows) - len(missing), reads + len(rows)
                cache[missing[: limit - int(cache.sum())]] = True
        if epoch + 1 in EPOCHS:
            rates.append(hits / reads)
    return rates


def hit_table(images: int) -> list[str]:
    """Return the table of hit rates, for caches that hold an eighth or all of the images that a host reads."""
    epochs = " / ".join(map(str, EPOCHS))
    lines = [
        f"Hit rates in epochs {epochs} of {images:,} images, by the part of the images that a host may read and the "
        "cache of one process holds:",
        "",
    ]
    lines += ["| order | hosts | processes a host | 1/8, own | 1/8, shared | all, own | all, shared |"]
    lines += ["|---|---:|---:|---|---|---|---|"]
    for order, hosts in (("global", 1), ("global", 4), ("blocked", 4)):
        sampler = sample_order(order, hosts, images)
        readable = len(sampler.rows_of_host(0))
        for ranks in RANKS:
            steps = range(max(EPOCHS) * STEPS)
            batches = [[sampler.rank_batch(step, rank, ranks * hosts).rows for rank in range(ranks)] for step in steps]
            cells = [
                " / ".join(f"{hits:.0%}" for hits in hit_rates(batches, capacity, shared=shared))
                for capacity in (readable // 8, readable)
                for shared in (False, True)
            ]
            lines.append(f"| {order} | {hosts} | {ranks} | {' | '.join(cells)} |")
    return [*lines, ""]


@dataclass(frozen=True)
class Reading:
    """Images that a process reads: batches of the ranks of one node."""

    directory: str
    batch: int
    size: int
    cache_bytes: int
    processes: int

    def config(self) -> RunConfig:
        section: dict[str, object] = {"loader": "native", "workers": 1, "image_size": self.size}
        if self.cache_bytes:
            section |= {"decoded_cache_bytes": self.cache_bytes, "decoded_cache_form": "coefficients"}
        train = {"global_batch": self.processes * self.batch}
        return RunConfig.model_validate({"input": section, "train": train})


def read_batches(reading: Reading, rank: int, path: str, pipe: Connection) -> None:
    """Serve a loader in a process of its own: for each number of steps, send images, CPU seconds and a checksum."""
    os.environ[env.DECODED_CACHE] = path
    config = reading.config()
    split = open_shard_set(reading.directory, config).split("train")
    order, phases = build_sampler(config, split), image_phases(config, len(split))
    loader = build_loader(
        config, split, order, phases=phases, ranks=range(rank, rank + 1), world_size=reading.processes, device="cpu"
    )
    step, checksum = 0, ""
    while steps := pipe.recv():
        started, images = cpu_seconds(), 0
        for batch in loader.batches(step, step + steps):
            images += len(batch)
        used = cpu_seconds() - started
        step, checksum = step + steps, hashlib.sha256(np.asarray(batch.images).tobytes()).hexdigest()
        pipe.send((images, used, checksum, loader.cached_bytes["decoded"]))
    loader.close()


class Node:
    """Processes that read, each its part of the batches."""

    def __init__(self, pipes: Sequence[Connection]) -> None:
        self._pipes = pipes
        self.checksums: list[str] = []
        self.cached_bytes = 0

    def read(self, steps: int) -> float:
        """Read these steps at the same time in all processes; return images per CPU-second."""
        for pipe in self._pipes:
            pipe.send(steps)
        images, seconds, self.checksums, cached = map(list, zip(*(pipe.recv() for pipe in self._pipes), strict=True))
        self.cached_bytes = sum(cached)
        return rate(sum(images), sum(seconds))


@contextmanager
def reading_node(reading: Reading, *, shared: bool) -> Iterator[Node]:
    """Yield processes with the cache of `reading`, shared or one each."""
    context = multiprocessing.get_context("spawn")
    with shared_memory("benchmark", reading.processes * reading.cache_bytes if shared else 0) as path:
        ends = [context.Pipe() for _ in range(reading.processes)]
        processes = [
            context.Process(target=read_batches, args=(reading, rank, path or "", theirs))
            for rank, (_, theirs) in enumerate(ends)
        ]
        for process in processes:
            process.start()
        for _, theirs in ends:
            theirs.close()
        try:
            yield Node([own for own, _ in ends])
            for own, _ in ends:
                own.send(0)
        finally:
            for own, _ in ends:
                own.close()
            for process in processes:
                process.join()


def coefficient_bytes(directory: str) -> int:
    """Return the bytes of all images as coefficients, with the table and the prefixes of a shared cache."""
    split = ShardSet.open(directory).split("train")
    pixels = (3 * split.column("height").astype(np.int64) * split.column("width")).tolist()
    packed = CropDecoder(1).pack([split.read(row) for row in range(len(split))], pixels)
    kept = [size if one is None else one.nbytes for one, size in zip(packed, pixels, strict=True)]
    return sum(kept) + 64 * len(kept) + 8192


def rate_table(directory: str, nodes: Sequence[int], images: int, batch: int, size: int, rounds: int) -> list[str]:
    """Return the table of one shard set; `nodes` has numbers of processes."""
    split, total = ShardSet.open(directory).split("train"), coefficient_bytes(directory)
    lines = [
        f"{len(split):,} images of {split.column('size').mean() / 1000:.1f} kB, {total / 1e6:.0f} MB as coefficients; "
        f"{size} px:",
        "",
        "| processes | their bytes hold | cache | kept, MB | images per CPU-second | ratio to own caches |",
        "|---:|---|---|---:|---:|---:|",
    ]
    for processes in nodes:
        lines += node_rows(Reading(directory, batch, size, 0, processes), len(split), total, images, rounds)
    return [*lines, ""]


def node_rows(reading: Reading, split_images: int, total: int, images: int, rounds: int) -> list[str]:
    """Return the rows of one number of processes.

    Args:
        reading: what they read, without a cache.
        split_images: images of the shard set.
        total: bytes of these images as coefficients.
        images: images of a measurement.
    """
    processes, lines = reading.processes, []
    epoch = -(-split_images // (processes * reading.batch))
    steps = max(1, images // (processes * reading.batch))
    with ExitStack() as stack:
        variants = {
            (name, kind): stack.enter_context(
                reading_node(replace(reading, cache_bytes=int(part * total) // processes), shared=kind == SHARED)
            )
            for name, part in {**PARTS, "": 0.0}.items()
            for kind in ((OWN, SHARED) if part else (NONE,))
        }
        rates: dict[tuple[str, str], list[float]] = {key: [] for key in variants}
        for node in variants.values():
            node.read(FILL_EPOCHS * epoch)
        checksums = {tuple(node.checksums) for node in variants.values()}
        assert len(checksums) == 1, "the images of the caches differ"
        for _ in range(rounds):
            for key, node in variants.items():
                rates[key].append(node.read(steps))
        for (name, kind), node in variants.items():
            own = rates[name, OWN] if name else rates["all images", OWN]
            ratio = median_ratio(rates[name, kind], own)
            median = statistics.median(rates[name, kind])
            kept = node.cached_bytes / 1e6
            lines.append(f"| {processes} | {name} | {kind} | {kept:.0f} | {median:.0f} | {ratio:.2f} |")
    return lines


def main() -> None:
    parser = Options(__doc__)
    parser.add_argument("shard_sets", nargs="*", metavar="SHARD_SET")
    parser.add_size("--images", full=8000, small=16, type=int, help="images of a measurement")
    parser.add_size("--batch", full=32, small=4, type=int, help="images of a process in a step")
    parser.add_size("--size", full=224, small=32, type=int)
    parser.add_size("--rounds", full=5, small=1, type=int)
    parser.add_size("--processes", full=[2, 8], small=[2], type=int, nargs="+", help="processes of a node")
    parser.add_size("--order-images", full=16384, small=1024, type=int, help="images of the hit rates")
    options = parser.read()
    if not options.shard_sets and not options.small:
        parser.error("SHARD_SET: missing. Give the shard sets to read.")
    try:
        require_native()
    except InputError as error:
        exit_unavailable(str(error))
    if not can_share_images():
        exit_unavailable("the native extension is of an earlier version")
    lines = head("Decoded cache: own or shared", PACKAGES) + hit_table(options.order_images)
    with tempfile.TemporaryDirectory() as scratch:
        for directory in options.shard_sets or [str(make_shards(Path(scratch), images=24))]:
            lines += rate_table(
                directory, options.processes, options.images, options.batch, options.size, options.rounds
            )
    write_results(options.results, "shared-cache.md", [*lines, READING])


if __name__ == "__main__":
    main()
