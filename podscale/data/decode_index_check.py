"""Statistics and verification of the decode indexes of a local shard set.

Verification compares the checksum of every image, and decodes a sample of images with their indexes. A damaged index is
no damage of the set: an image whose index cannot be used is decoded without it.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from podscale.data import native
from podscale.data.crop import CropParams, CropParamsBatch
from podscale.data.decode import BadRecord, Pixels, crop_and_resize, decode
from podscale.data.decode_index import DecodeIndex, ImageIndex, decode_index_path, is_index_of
from podscale.data.manifest import Damage, Shard
from podscale.data.shard_set import ShardSet, Split
from podscale.errors import InputError
from podscale.util.formatting import format_bytes, format_count, join_words
from podscale.util.progress_reports import ProgressCallback, ProgressReporter, ignore_progress

DECODED_IMAGES = 200
"""Images of a split that are decoded with their indexes, evenly spaced."""
DECODED_SIDE = 32
"""Side of the decoded crops, pixels."""
_BATCH = 50
"""Images that are decoded in one call."""
_SHOWN = 3
"""Images of a shard that a message names."""

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class DecodeIndexStatistics:
    """Decode indexes of a split.

    Args:
        shards: Shards with a usable index.
        unusable: Shards whose index is damaged, of another version, or of another shard.
        images: Images in use that have an entry or more.
        intervals: MCUs between two entries, of the shards; an image may have more.
        bytes: Size of the usable indexes.
        fraction: That size, as a fraction of all shards of the split.
    """

    shards: int
    unusable: int
    images: int
    intervals: list[int]
    bytes: int
    fraction: float

    def to_text(self, shards: int, images: int) -> str:
        """Return one line, for a split of this many shards and images."""
        bad = f"{self.unusable:,} unusable" if self.unusable else ""
        if not self.shards:
            return bad or "none"
        of_shards = f"{self.shards:,} of {format_count(shards, 'shard')}"
        of_images = f"{self.images:,} of {format_count(images, 'image')}"
        intervals = join_words([str(interval) for interval in self.intervals], "or")
        size = f"{format_bytes(self.bytes)} ({self.fraction:.1%} of the shards)"
        return ", ".join(filter(None, (of_shards, of_images, f"every {intervals} MCUs", size, bad)))


@dataclass(frozen=True)
class DecodeIndexVerification:
    """Result of a verification: images with their checksum, images that were decoded, and the unusable files."""

    images: int
    decoded: int
    damage: tuple[Damage, ...]


def decode_index_statistics(split: Split, shards: tuple[Shard, ...]) -> DecodeIndexStatistics:
    """Return the statistics of a split with these shards."""
    found, unusable, images = [], 0, 0
    for shard, rows in zip(shards, _rows_by_shard(split, shards), strict=True):
        try:
            index = DecodeIndex.read(split.directory / shard.name, shard.sha256, shard.count)
        except InputError:
            unusable += 1
            continue
        if index is not None:
            found.append(index)
            images += int(np.count_nonzero(index.lengths[split.numbers_in_shard(rows)]))
    size, of = sum(index.size for index in found), sum(shard.bytes for shard in shards)
    intervals = sorted({index.interval for index in found})
    return DecodeIndexStatistics(len(found), unusable, images, intervals, size, size / of if of else 0.0)


def verify_decode_indexes(
    shard_set: ShardSet, *, damaged: Collection[str] = (), progress: ProgressCallback = ignore_progress
) -> DecodeIndexVerification:
    """Check the decode indexes of a local set: files, checksums of all images, and the pixels of a sample.

    Without the native extension no image is decoded.

    Args:
        damaged: Files of the set that are damaged; indexes of such shards are not checked.
    """
    ticker = ProgressReporter("verify", progress, shard_set.manifest.count)
    damage, sound, decoded = [], 0, 0
    for name, summary in shard_set.manifest.splits.items():
        split = shard_set.split(name)
        rows_by_shard = _rows_by_shard(split, summary.shards)
        step = max(1, -(-len(split) // DECODED_IMAGES))
        for shard, rows in zip(summary.shards, rows_by_shard, strict=True):
            file = f"{name}/{decode_index_path(Path(shard.name)).name}"
            if f"{name}/{shard.name}" not in damaged and f"{name}/index" not in damaged:
                try:
                    index = DecodeIndex.read(split.directory / shard.name, shard.sha256, shard.count)
                except InputError as error:
                    damage.append(Damage(file, error.problem))
                    index = None
                if index is not None:
                    found = _ShardCheck(split, index, rows)
                    sample = rows[rows % step == 0]
                    decoded += found.compare_pixels(sample) if native.is_available() else 0
                    sound += found.sound
                    damage += [Damage(file, problem) for problem in found.problems()]
            ticker.add(shard.count, shard.bytes)
    ticker.close()
    return DecodeIndexVerification(sound, decoded, tuple(damage))


def _rows_by_shard(split: Split, shards: tuple[Shard, ...]) -> list[Rows]:
    ends = np.searchsorted(split.column("shard"), np.arange(len(shards) + 1)).tolist()
    return [np.arange(begin, end) for begin, end in pairwise(ends)]


class _ShardCheck:
    """Check of one shard's index against the images of the shard."""

    def __init__(self, split: Split, index: DecodeIndex, rows: Rows) -> None:
        self._split = split
        self._indexes = {
            row: found
            for row, number in zip(rows.tolist(), split.numbers_in_shard(rows).tolist(), strict=True)
            if len(found := index[number])
        }
        self._of_another_image = [
            row for row, found in self._indexes.items() if not is_index_of(found, split.read(row))
        ]
        self._with_other_pixels: list[int] = []

    @property
    def sound(self) -> int:
        """Images whose index has the right checksum."""
        return len(self._indexes) - len(self._of_another_image)

    def compare_pixels(self, rows: Rows) -> int:
        """Decode those of `rows` that have an index with it and without it; return their number."""
        wrong = set(self._of_another_image)
        chosen = [row for row in rows.tolist() if row in self._indexes and row not in wrong]
        for begin in range(0, len(chosen), _BATCH):
            batch = np.array(chosen[begin : begin + _BATCH])
            indexes = [self._indexes[row] for row in batch.tolist()]
            self._with_other_pixels += _rows_with_other_pixels(self._split, batch, indexes)
        return len(chosen)

    def problems(self) -> Iterator[str]:
        """Yield the problem of each kind, with the first images that have it."""
        for problem, rows in (
            ("entries are damaged or of other images", self._of_another_image),
            ("entries do not lead to the pixels of the image", self._with_other_pixels),
        ):
            if rows:
                keys = ", ".join(str(self._split.keys[row]) for row in rows[:_SHOWN])
                more = ", ..." if len(rows) > _SHOWN else ""
                yield f"{problem}: {len(rows):,} of {len(self._indexes):,} images (samples {keys}{more})"


def _rows_with_other_pixels(split: Split, rows: Rows, indexes: list[ImageIndex]) -> list[int]:
    """Return those of `rows` that the extension decodes otherwise with these indexes than the reference path."""
    records = [split.read(row) for row in rows.tolist()]
    heights, widths = split.column("height")[rows], split.column("width")[rows]
    decoder, wrong = native.CropDecoder(1), np.zeros(len(rows), dtype=np.bool_)
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
    return [int(row) for row in rows[wrong]]


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
