"""Decode indexes of a complete local shard set: those that are missing are written, and all are verified.

The verification compares the checksum of every image, and decodes a sample of images with their indexes. A damaged
index is no damage of the set: an image whose index cannot be used is decoded without it.
"""

from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from podscale.data import native
from podscale.data.crop import CropParams, CropParamsBatch
from podscale.data.decode import BadRecord, Pixels, crop_and_resize, decode
from podscale.data.decode_index import DecodeIndex, ImageIndex, decode_index_path, is_index_of, write_decode_index
from podscale.data.index import JPEG, read_index
from podscale.data.manifest import Damage, Shard
from podscale.data.shard_set import ShardSet, Split
from podscale.data.sharding.file_formats import map_file
from podscale.data.sharding.pack import explain_write_errors
from podscale.errors import InputError
from podscale.util import host_info
from podscale.util.progress_reports import ProgressCallback, ProgressReporter, ignore_progress

DECODED_IMAGES = 200
"""Images of a split that are decoded with their indexes, evenly spaced."""
DECODED_SIDE = 32
"""Side of the decoded crops, pixels."""
_BATCH = 50
"""Images that are decoded in one call."""
_SHOWN = 3
"""Images of a shard that a message names."""


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
            tasks, pool.map(lambda task: _index_shard(task, interval, verify), tasks), strict=True
        ):
            ticker.add(task.shard.count, task.shard.bytes)
            results.append((is_new, size))
    ticker.close()
    written, sizes = sum(is_new for is_new, _ in results), sum(size for _, size in results)
    return IndexedShards(len(tasks), written, sizes, sum(task.shard.bytes for task in tasks))


def _shards(shard_set: ShardSet) -> Iterator[_ShardToIndex]:
    for name, split in shard_set.manifest.splits.items():
        columns = read_index(shard_set.directory / name / "index")
        firsts = np.searchsorted(columns["shard"], np.arange(len(split.shards) + 1)).tolist()
        for number, shard in enumerate(split.shards):
            rows = slice(firsts[number], firsts[number + 1])
            records = [columns[column][rows].tolist() for column in ("offset", "size", "format")]
            yield _ShardToIndex(shard_set.directory / name / shard.name, shard, list(zip(*records, strict=True)))


def _index_shard(task: _ShardToIndex, interval: int, verify: bool) -> tuple[bool, int]:
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
        native.build_decode_index(content[offset : offset + size], interval) if kind == JPEG else b""
        for offset, size, kind in task.records
    ]
    if found is not None and all(found[number].tobytes() == image for number, image in enumerate(images)):
        return False, found.size
    write_decode_index(task.path, task.shard.sha256, interval, images)
    return True, sum(map(len, images)) + 8 * len(images)


@dataclass(frozen=True)
class DecodeIndexVerification:
    """Result of a verification of decode indexes.

    Args:
        images: Images whose index has the right checksum.
        decoded: Images that were decoded with their index and without it.
        damage: Unusable files.
    """

    images: int
    decoded: int
    damage: tuple[Damage, ...]


def verify_decode_indexes(
    shard_set: ShardSet, *, damaged: Collection[str] = (), progress: ProgressCallback = ignore_progress
) -> DecodeIndexVerification:
    """Check the decode indexes of a local set: files, checksums of all images, and the pixels of a sample.

    Without the native extension no image is decoded.

    Args:
        damaged: Files of the set that are damaged; indexes of such shards are not checked.
    """
    ticker = ProgressReporter("verify", progress, shard_set.manifest.count)
    results = []
    for name, summary in shard_set.manifest.splits.items():
        split = shard_set.split(name)
        for number, shard in enumerate(summary.shards):
            if f"{name}/{shard.name}" not in damaged and f"{name}/index" not in damaged:
                results.append(_verify_shard(split, number, shard))
            ticker.add(shard.count, shard.bytes)
    ticker.close()
    return DecodeIndexVerification(
        sum(found.images for found in results),
        sum(found.decoded for found in results),
        tuple(chain.from_iterable(found.damage for found in results)),
    )


def _verify_shard(split: Split, number: int, shard: Shard) -> DecodeIndexVerification:
    """Check the index of one shard, the one of this number in its split."""
    path = split.directory / shard.name
    file = f"{split.name}/{decode_index_path(path).name}"
    try:
        index = DecodeIndex.read(path, shard.sha256, shard.count)
    except InputError as error:
        return DecodeIndexVerification(0, 0, (Damage(file, error.problem),))
    if index is None:
        return DecodeIndexVerification(0, 0, ())
    rows = split.rows_of_shard(number)
    numbers = split.numbers_in_shard(rows)
    indexes = {row: found for row, at in zip(rows.tolist(), numbers.tolist(), strict=True) if len(found := index[at])}
    sound = {row: found for row, found in indexes.items() if is_index_of(found, split.read(row))}
    step = max(1, -(-len(split) // DECODED_IMAGES))
    sample = {row: found for row, found in sound.items() if row % step == 0} if native.is_available() else {}
    rows_by_problem = {
        "entries are damaged or of other images": [row for row in indexes if row not in sound],
        "entries do not lead to the pixels of the image": _rows_with_other_pixels(split, sample),
    }
    damage = []
    for problem, wrong in rows_by_problem.items():
        if wrong:
            keys = ", ".join(str(split.keys[row]) for row in wrong[:_SHOWN]) + (", ..." if len(wrong) > _SHOWN else "")
            damage.append(Damage(file, f"{problem}: {len(wrong):,} of {len(indexes):,} images (samples {keys})"))
    return DecodeIndexVerification(len(sound), len(sample), tuple(damage))


def _rows_with_other_pixels(split: Split, indexes: Mapping[int, ImageIndex]) -> list[int]:
    """Return the rows that the extension decodes otherwise with their indexes than the reference path."""
    rows = list(indexes)
    wrong = []
    for begin in range(0, len(rows), _BATCH):
        batch = rows[begin : begin + _BATCH]
        is_wrong = _differs_from_reference(split, batch, [indexes[row] for row in batch])
        wrong += [row for row, differs in zip(batch, is_wrong, strict=True) if differs]
    return wrong


def _differs_from_reference(split: Split, rows: list[int], indexes: list[ImageIndex]) -> list[bool]:
    """Return True for each row that the extension decodes otherwise with its index than the reference path."""
    records = [split.read(row) for row in rows]
    heights, widths = split.column("height")[rows], split.column("width")[rows]
    decoder, wrong = native.CropDecoder(1), [False] * len(rows)
    pixels = [_decode(record) for record in records]
    for crops in _crops(heights.tolist(), widths.tolist()):
        columns = CropParamsBatch(*(np.array(column) for column in zip(*crops, strict=True)))
        images = np.empty((len(rows), DECODED_SIDE, DECODED_SIDE, 3), dtype=np.uint8)
        status = decoder.decode(records, heights, widths, columns, images, "bilinear", indexes)
        for slot, (whole, crop) in enumerate(zip(pixels, crops, strict=True)):
            if whole is None:
                continue  # a damaged image is no damage of its index
            wanted = np.asarray(crop_and_resize(whole, crop, DECODED_SIDE, "bilinear"))
            wrong[slot] |= status[slot] != 0 or not np.array_equal(images[slot], wanted)
    return wrong


def _decode(record: Pixels) -> Pixels | None:
    try:
        return decode(record)
    except BadRecord:
        return None


def _crops(heights: list[int], widths: list[int]) -> Iterator[list[CropParams]]:
    """Yield two crops of each image: all of it, which reads every entry, and its lower right quarter, amid the data."""
    square = (DECODED_SIDE, DECODED_SIDE, 0, 0, False)
    sizes = list(zip(heights, widths, strict=True))
    yield [CropParams(0, 0, width, height, *square) for height, width in sizes]
    yield [
        CropParams(width // 2, height // 2, width - width // 2, height - height // 2, *square)
        for height, width in sizes
    ]
