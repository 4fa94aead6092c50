"""Hint that the loader `native` would decode a shard set faster with decode indexes."""

import numpy as np

from podscale.config.schedule import CropSection
from podscale.data.index import JPEG, ImageFlag
from podscale.data.shard_set import Split

MIN_BYTES = 15_000
"""Mean size of a JPEG from which on an index saves time, bytes: docs/explanation/input.md, Decode index."""


def decode_index_hint(split: Split, crop: CropSection) -> str:
    """Return the hint for a split; empty if it has indexes, or if they would save little with these crops.

    Either all shards have an index or none, so the first one decides.
    """
    is_sequential = (split.column("format") == JPEG) & ((split.column("flags") & ImageFlag.PROGRESSIVE) == 0)
    sizes = split.column("size")[is_sequential]
    takes_whole_images = crop.padding is not None
    if takes_whole_images or not 0 < len(split) <= 2 * len(sizes) or np.mean(sizes) < MIN_BYTES:
        return ""
    if split.decode_index(0) is not None:
        return ""
    place = " where the set is; copy its .decode files too" if split.is_remote else ""
    return (
        f"the {split.name} split has no decode index: with one, the loader native decodes images of "
        f"{np.mean(sizes) / 1000:.0f} kB 1.1 to 1.5 times as fast, with the same pixels. "
        f"Run `podscale shard RUN --decode-index`{place}."
    )
