"""Levers of the input pipeline: changes that raise the rate of a CPU loader, each measured on one sample of the images.

The sample is packed as it is, and again with each change that alters the shard set. Rows take turns. Those with images
in memory are timed after every image of the sample was kept.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

from podscale.bench.images import pack_class_folders, write_class_folders
from podscale.bench.input_rates import (
    BatchSizes,
    InputRow,
    InputSettings,
    Rate,
    loader_batches,
    loader_config,
    measure_rounds,
)
from podscale.config import InputSection
from podscale.config.data import DataSection
from podscale.data.index import JPEG
from podscale.data.loaders.base import Loader
from podscale.data.loaders.cache_form import CacheForm
from podscale.data.native_support import has_mostly_sequential_jpegs
from podscale.data.shard_set import Split

LEVER_LOADERS = ("native", "reference")
"""Loaders whose levers are measured, the faster first."""
SAMPLE_IMAGES = 256
SAMPLE_PIXEL_BYTES = 512 * 2**20
"""Limit of the decoded sample, bytes; MIN_SAMPLE_IMAGES are taken all the same."""
MIN_SAMPLE_IMAGES = 8
SHARD_BYTES = 2**40
"""Size limit of a shard of the sample, bytes: one shard has all of it."""
SECONDS_SHARE = 0.3
"""Time of a lever's row, as a fraction of a loader's row."""
CROP_FRACTION = 0.875
"""Side of the usual centre crop over the short side: 224 of 256 pixels. It gives the short side that is tried."""


@dataclass(frozen=True)
class Variant:
    """Sample in one form, with the loader's cache.

    Args:
        name: Change, for readers; "" for the set as it is.
        cache: Form of the images in memory; None: no cache.
        short_side: Value of data.resize_short; None: the images as they are.
    """

    name: str
    split: Split = field(repr=False, compare=False)
    cache: CacheForm | None = None
    short_side: int | None = None


@dataclass(frozen=True)
class LeverRow:
    """Measured rates of a variant.

    Args:
        rates: One a round; empty if it failed for `reason`.
        bytes_per_image: Mean bytes in memory with a cache, else mean bytes of a record.
        index_share: Bytes of the decode index over those of the records; 0 without an index.
    """

    variant: Variant
    rates: tuple[Rate, ...]
    bytes_per_image: float
    index_share: float = 0.0
    reason: str = ""

    @property
    def per_core(self) -> float:
        """Images per CPU-second, median of the rounds."""
        return median(rate.per_cpu_second for rate in self.rates)


@dataclass(frozen=True)
class MeasuredLevers:
    """Levers of one loader; `base` is the set as it is."""

    loader: str
    images: int
    has_index: bool
    base: LeverRow
    changes: tuple[LeverRow, ...]


def sample_rows(split: Split) -> list[int]:
    """Return rows of a split, evenly spaced, whose decoded images fit into SAMPLE_PIXEL_BYTES."""
    rows = split.rows_of_shard(0) if split.is_remote else np.arange(len(split))  # each remote shard is a download
    most = max(MIN_SAMPLE_IMAGES, int(SAMPLE_PIXEL_BYTES / mean_pixel_bytes(split)))
    count = min(len(rows), SAMPLE_IMAGES, most)
    chosen: list[int] = rows[np.linspace(0, len(rows) - 1, count).astype(np.int64)].tolist()
    return chosen


def mean_pixel_bytes(split: Split) -> float:
    """Return the mean bytes of a decoded image."""
    return 3.0 * float(np.mean(split.column("height").astype(np.int64) * split.column("width")))


def smaller_short_side(split: Split, image_size: int) -> int | None:
    """Return the short side that batches of `image_size` pixels need; None if most images are no larger."""
    wanted = round(image_size / CROP_FRACTION)
    stored = np.median(np.minimum(split.column("height"), split.column("width")))
    return wanted if stored > wanted else None


def measure_levers(
    section: InputSection, data: DataSection, split: Split, row: InputRow, settings: InputSettings, folder: Path
) -> MeasuredLevers:
    """Measure the levers of a loader on a sample of a split.

    Args:
        section: Options of the input pipeline but for loader, workers, order, repeats and cache.
        data: Options of the encoding, for the smaller images.
        row: Loader, one of LEVER_LOADERS, and its workers.
        folder: Folder for the packed sample.
    """
    variants = _variants(section, data, split, row.loader, folder)
    images = len(variants[0].split)
    batch = min(settings.batch, max(1, images // 4))
    warmup = -(-images // batch) + 1
    kept = {variant: Counter[str]() for variant in variants}
    once = section.model_copy(update={"repeats": 1})

    def open_variant(variant: Variant) -> BatchSizes:
        config = loader_config(once, row, batch, variant.cache)
        return loader_batches(config, variant.split, at_end=partial(_note_bytes, kept[variant]))

    rates, errors = measure_rounds(
        {variant: partial(open_variant, variant) for variant in variants},
        settings.rounds,
        seconds=settings.seconds * SECONDS_SHARE / settings.rounds,
        warmup=warmup,
    )
    if variants[0] in errors:
        raise errors[variants[0]]
    rows = [_lever_row(variant, rates[variant], kept[variant]["decoded"], errors.get(variant)) for variant in variants]
    has_index = _has_index(split) and has_mostly_sequential_jpegs(split)
    return MeasuredLevers(row.loader, images, has_index, rows[0], tuple(rows[1:]))


def _note_bytes(kept: Counter[str], loader: Loader) -> None:
    kept["decoded"] = loader.cached_bytes["decoded"]


def _lever_row(variant: Variant, rates: Sequence[Rate], kept_bytes: int, error: Exception | None) -> LeverRow:
    split = variant.split
    record_bytes = float(split.column("size").sum())
    index = split.decode_index(0)
    total = kept_bytes if variant.cache else record_bytes
    reason = "" if error is None else " ".join(str(error).split()) or repr(error)
    found = () if error is not None else tuple(rates)
    return LeverRow(variant, found, total / len(split), index.size / record_bytes if index else 0.0, reason)


def _variants(section: InputSection, data: DataSection, split: Split, loader: str, folder: Path) -> list[Variant]:
    """Pack the sample and return its variants, the set as it is first."""
    names = {True: "image.jpg", False: "image.png"}
    records = ((names[bool(split.column("format")[row] == JPEG)], bytes(split.read(row))) for row in sample_rows(split))
    images = folder / "images"
    write_class_folders(records, images)
    interval = data.decode_index or DataSection().decode_index

    def pack(name: str, index: int | None, short_side: int | None = None) -> Split:
        section = data.model_copy(
            update={"decode_index": index, "resize_short": short_side, "shard_bytes": SHARD_BYTES}
        )
        return pack_class_folders(images, folder / name, section).split("train")

    indexed = _has_index(split)
    base = pack("base", interval if indexed else None)
    variants = [Variant("", base)]
    is_native = loader == "native" and has_mostly_sequential_jpegs(base)
    if is_native and not indexed:
        variants.append(Variant("decode index", pack("indexed", interval)))
    if is_native:
        variants.append(Variant("coefficients in memory", base, "coefficients"))
    variants.append(Variant("decoded images in memory", base, "pixels"))
    if (short_side := smaller_short_side(split, section.image_size)) is not None:
        resized = pack("resized", interval if indexed else None, short_side)
        variants.append(Variant("smaller images", resized, short_side=short_side))
    return variants


def _has_index(split: Split) -> bool:
    return split.decode_index(0) is not None
