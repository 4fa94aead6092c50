"""Statistics of the decode indexes of a local shard set."""

from dataclasses import dataclass

import numpy as np

from podscale.data.decode_index import DecodeIndex
from podscale.data.manifest import Shard
from podscale.data.shard_set import Split
from podscale.errors import InputError
from podscale.util.formatting import format_bytes, format_count, join_words


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


def decode_index_statistics(split: Split, shards: tuple[Shard, ...]) -> DecodeIndexStatistics:
    """Return the statistics of a split with these shards."""
    found, unusable, images = [], 0, 0
    for number, shard in enumerate(shards):
        try:
            index = DecodeIndex.read(split.directory / shard.name, shard.sha256, shard.count)
        except InputError:
            unusable += 1
            continue
        if index is not None:
            found.append(index)
            images += int(np.count_nonzero(index.lengths[split.numbers_in_shard(split.rows_of_shard(number))]))
    size, of = sum(index.size for index in found), sum(shard.bytes for shard in shards)
    intervals = sorted({index.interval for index in found})
    return DecodeIndexStatistics(len(found), unusable, images, intervals, size, size / of if of else 0.0)
