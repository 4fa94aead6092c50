"""Write the decode indexes of a complete shard set whose shards have none, or another one."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from podscale.data import index, native
from podscale.data.decode_index import DecodeIndex, write_decode_index
from podscale.data.manifest import Shard
from podscale.data.shard_set import ShardSet, map_file
from podscale.data.sharding.pack import explain_write_errors
from podscale.errors import InputError
from podscale.util import host_info
from podscale.util.progress_reports import ProgressCallback, ProgressReporter, ignore_progress


@dataclass(frozen=True)
class IndexedShards:
    """Decode indexes of a set: shards, those of them that were written now, and the bytes of indexes and shards."""

    shards: int
    written: int
    index_bytes: int
    shard_bytes: int


@dataclass(frozen=True)
class _ShardToIndex:
    path: Path
    shard: Shard
    records: list[tuple[int, int, int]]
    """Offset, bytes and format of each image."""


def index_shards(
    directory: Path,
    interval: int,
    *,
    workers: int = 0,
    verify: bool = False,
    progress: ProgressCallback = ignore_progress,
) -> IndexedShards:
    """Write the missing decode indexes of a complete local shard set, with an entry at every `interval`-th MCU.

    Args:
        workers: threads; 0 for one per CPU.
        verify: compare the existing indexes with the images, and write those again that differ in an entry.

    Raises:
        InputError: The extension is not installed, or the set is incomplete or cannot be written.
    """
    if not native.is_installed():
        raise InputError(
            "needs the native extension, which is not installed",
            field="--decode-index",
            hint="`podscale doctor` prints the remedy.",
        )
    shard_set = ShardSet.open(directory)
    ticker = ProgressReporter("index", progress, shard_set.manifest.count)
    tasks = list(_shards(shard_set))
    with explain_write_errors(directory), ThreadPoolExecutor(workers or host_info.cpu_count()) as pool:
        results = []
        for task, (is_new, size) in zip(
            tasks, pool.map(lambda task: _index(task, interval, verify), tasks), strict=True
        ):
            ticker.add(task.shard.count, task.shard.bytes)
            results.append((is_new, size))
    ticker.close()
    written, sizes = sum(is_new for is_new, _ in results), sum(size for _, size in results)
    return IndexedShards(len(tasks), written, sizes, sum(task.shard.bytes for task in tasks))


def _shards(shard_set: ShardSet) -> Iterator[_ShardToIndex]:
    for name, split in shard_set.manifest.splits.items():
        columns = index.read_index(shard_set.directory / name / "index")
        firsts = np.searchsorted(columns["shard"], np.arange(len(split.shards) + 1)).tolist()
        for number, shard in enumerate(split.shards):
            rows = slice(firsts[number], firsts[number + 1])
            records = [columns[column][rows].tolist() for column in ("offset", "size", "format")]
            yield _ShardToIndex(shard_set.directory / name / shard.name, shard, list(zip(*records, strict=True)))


def _index(task: _ShardToIndex, interval: int, verify: bool) -> tuple[bool, int]:
    """Write the index of a shard unless it is there. Returns if it was written, and its bytes."""
    try:
        found = DecodeIndex.read(task.path, task.shard.sha256, len(task.records))
    except InputError:
        found = None
    if found is not None and found.interval != interval:
        found = None
    if found is not None and not verify:
        return False, found.size
    with task.path.open("rb") as file:
        content = map_file(file)
    images = [
        native.build_decode_index(content[offset : offset + size], interval) if kind == index.JPEG else b""
        for offset, size, kind in task.records
    ]
    if found is not None and all(found[number].tobytes() == image for number, image in enumerate(images)):
        return False, found.size
    write_decode_index(task.path, task.shard.sha256, interval, images)
    return True, sum(map(len, images)) + 8 * len(images)
