"""Summary of a shard set (counts, sizes, native decoding, decode indexes, rejects) and contact sheets of its images."""

import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageOps

from podscale.data.decode_index import REMEDY, DecodeIndex
from podscale.data.index import JPEG, ImageFlag
from podscale.data.manifest import Shard
from podscale.data.manifest import verify_shard_set as verify_files
from podscale.data.native_support import NativeSupport
from podscale.data.shard_set import ShardSet, Split
from podscale.data.sharding.decode_indexes import DecodeIndexVerification, verify_decode_indexes
from podscale.data.sharding.merge_records import DUPLICATES_FILE, REJECTS_FILE
from podscale.errors import InputError
from podscale.util.formatting import format_bytes, format_count, join_words
from podscale.util.progress_reports import ProgressCallback, ignore_progress

MAX_EXAMPLES = 20
"""Rejects and duplicates shown; the files list all of them."""
BAR_WIDTH = 30
"""Length of the longest bar of the histogram, characters."""


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
class SplitStatistics:
    """Statistics of one split; quantiles are over the images in use."""

    images: int
    bytes: int
    shards: int
    classes: dict[str, int]
    formats: dict[str, int]
    flags: dict[str, int]
    image_bytes: dict[str, int]
    width: dict[str, int]
    height: dict[str, int]
    decode_index: DecodeIndexStatistics
    native: NativeSupport


@dataclass(frozen=True)
class ShardSetSummary:
    """Summary of a shard set; `damage` and `decode_indexes` are None if nothing was verified."""

    directory: str
    source: str
    fingerprint: str
    splits: dict[str, SplitStatistics]
    rejects: dict[str, int]
    reject_examples: list[dict[str, Any]]
    duplicates: dict[str, int]
    duplicate_examples: list[dict[str, Any]]
    damage: list[str] | None
    decode_indexes: DecodeIndexVerification | None

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2, ensure_ascii=True)

    def to_text(self) -> str:
        return "\n".join(_summary_lines(self)) + "\n"

    __str__ = to_text


def inspect_shard_set(
    directory: Path, *, verify: bool = False, progress: ProgressCallback = ignore_progress
) -> ShardSetSummary:
    """Summarise a complete local shard set; with `verify`, read every shard and check its hash and its decode index."""
    shard_set = ShardSet.open(directory)
    manifest = shard_set.manifest
    damage, decode_indexes = None, None
    if verify:
        damage = verify_files(directory, manifest, progress)
        files = {entry.file for entry in damage}
        decode_indexes = verify_decode_indexes(shard_set, damaged=files, progress=progress)
    return ShardSetSummary(
        directory=str(directory),
        source=str(manifest.options["source"]),
        fingerprint=manifest.data_fingerprint,
        splits={name: _split_statistics(shard_set, name) for name in manifest.splits},
        rejects=manifest.rejects,
        reject_examples=_first_lines(directory / REJECTS_FILE),
        duplicates=manifest.duplicates,
        duplicate_examples=_first_lines(directory / DUPLICATES_FILE),
        damage=None if damage is None else [str(entry) for entry in damage],
        decode_indexes=decode_indexes,
    )


def _split_statistics(shard_set: ShardSet, name: str) -> SplitStatistics:
    split, summary = shard_set.split(name), shard_set.manifest.splits[name]
    formats, flags = split.column("format"), split.column("flags")
    jpeg = int((formats == JPEG).sum())
    indexes, unusable = _decode_indexes(split, summary.shards)
    counted = {str(flag.name).lower(): int(((flags & flag) != 0).sum()) for flag in ImageFlag}
    return SplitStatistics(
        images=summary.count,
        bytes=summary.bytes,
        shards=len(summary.shards),
        classes=dict(zip(shard_set.classes, summary.class_counts, strict=True)),
        formats={"jpeg": jpeg, "png": len(formats) - jpeg},
        flags={flag: count for flag, count in counted.items() if count},
        image_bytes=_quantiles(split, "size"),
        width=_quantiles(split, "width"),
        height=_quantiles(split, "height"),
        decode_index=_decode_index_statistics(split, summary.shards, indexes, unusable),
        native=NativeSupport.count(split, indexes),
    )


def _decode_indexes(split: Split, shards: tuple[Shard, ...]) -> tuple[dict[int, DecodeIndex], int]:
    """Return the usable decode indexes by the number of their shard, and the number of unusable ones."""
    found, unusable = {}, 0
    for number, shard in enumerate(shards):
        try:
            index = DecodeIndex.read(split.directory / shard.name, shard.sha256, shard.count)
        except InputError:
            unusable += 1
            continue
        if index is not None:
            found[number] = index
    return found, unusable


def _decode_index_statistics(
    split: Split, shards: tuple[Shard, ...], indexes: Mapping[int, DecodeIndex], unusable: int
) -> DecodeIndexStatistics:
    """Return the statistics of a split with these shards and indexes."""
    images = sum(
        int(np.count_nonzero(index.lengths[split.numbers_in_shard(split.rows_of_shard(number))]))
        for number, index in indexes.items()
    )
    size, of = sum(index.size for index in indexes.values()), sum(shard.bytes for shard in shards)
    intervals = sorted({index.interval for index in indexes.values()})
    return DecodeIndexStatistics(len(indexes), unusable, images, intervals, size, size / of if of else 0.0)


def _quantiles(split: Split, column: str) -> dict[str, int]:
    values = np.quantile(split.column(column), [0, 0.5, 1], method="nearest") if len(split) else [0, 0, 0]
    return dict(zip(("smallest", "median", "largest"), map(int, values), strict=True))


def _first_lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line, _ in zip(lines, range(MAX_EXAMPLES), strict=False)]


def _summary_lines(summary: ShardSetSummary) -> Iterator[str]:
    yield f"{summary.directory}  (source {summary.source}, fingerprint {summary.fingerprint})"
    for name, split in summary.splits.items():
        yield ""
        shards, size = format_count(split.shards, "shard"), format_bytes(split.bytes)
        yield f"{name}: {split.images:,} images, {len(split.classes)} classes, {shards}, {size}"
        for what in ("image_bytes", "width", "height"):
            spread = getattr(split, what)
            label = what.replace("_", " ")
            yield f"  {label:<12} {spread['smallest']:,} .. {spread['median']:,} (median) .. {spread['largest']:,}"
        kinds = {**{kind: n for kind, n in split.formats.items() if n}, **split.flags}
        yield "  of them      " + ", ".join(f"{count:,} {kind}" for kind, count in kinds.items())
        yield "  decode index " + split.decode_index.to_text(split.shards, split.images)
        yield from _native_lines(split)
        yield from _histogram(split.classes)
    yield ""
    yield f"rejects: {_format_counts(summary.rejects)}"
    for entry in summary.reject_examples:
        yield f"  {entry['source']}: {entry['reason']}: {entry['detail']}"
    yield f"duplicates: {_format_counts(summary.duplicates)}"
    for entry in summary.duplicate_examples:
        images = ", ".join(f"{image['split']} {image['class']} {image['source']}" for image in entry["images"])
        yield f"  {'CONFLICTING LABELS: ' if entry['conflicting'] else ''}{images}"
    if summary.damage is not None:
        yield f"verified: {'all files match the manifest' if not summary.damage else 'DAMAGED'}"
        yield from (f"  {entry}" for entry in summary.damage)
    if summary.decode_indexes is not None:
        yield from _verification_lines(summary.decode_indexes)


def _native_lines(split: SplitStatistics) -> Iterator[str]:
    """Yield the counts of images that the native extension does not decode, or decodes without an index."""
    unread = f" ({split.native.unread:,} headers not read)" if split.native.unread else ""
    for label, counts in (("not native", split.native.refused), ("no entry", split.native.without_index)):
        if counts or (unread and label == "not native"):
            total = f"{sum(counts.values()):,} of {format_count(split.images, 'image')}"
            yield f"  {label:<12} {total}: {_format_counts(counts)}{unread}"


def _verification_lines(found: DecodeIndexVerification) -> Iterator[str]:
    if not found.damage and not found.images:
        return
    checked = f"{format_count(found.images, 'image')} with the right checksum, {found.decoded:,} decoded and compared"
    if not found.damage:
        yield f"decode indexes: {checked}"
        return
    files = len({entry.file for entry in found.damage})
    yield f"decode indexes: {checked}; UNUSABLE in {format_count(files, 'shard')}"
    yield from (f"  {entry}" for entry in found.damage)
    yield f"  Such images are decoded without an index: more slowly, with the same pixels. `{REMEDY}` writes it again."


def _histogram(classes: dict[str, int]) -> Iterator[str]:
    """Yield one bar per class; of many classes, the ten largest and the ten smallest."""
    ordered = sorted(classes.items(), key=lambda pair: -pair[1])
    largest = max(1, ordered[0][1])
    shown = list(classes.items()) if len(classes) <= MAX_EXAMPLES else [*ordered[:10], ("...", 0), *ordered[-10:]]
    for name, count in shown:
        yield (
            f"  {name[:24]:<24} {count:>8,} {'#' * round(BAR_WIDTH * count / largest)}".rstrip()
            if name != "..."
            else "  ..."
        )


def _format_counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.items() if count) or "none"


MAX_ROWS, COLUMNS = 20, 10
"""Classes of a contact sheet, and images of each."""
CELL_PIXELS, GAP_PIXELS, CAPTION_PIXELS = 96, 4, 14
"""Pixels: side of one picture, space between two, height of a class name."""
MIN_SMOOTHED_SIDE = 32
"""Pixels; pictures with a shorter side are enlarged without smoothing."""


def contact_sheet(directory: Path, split: str, path: Path) -> Path:
    """Write a PNG with one row per class: up to `MAX_ROWS` evenly spaced ones, the first `COLUMNS` images of each."""
    shard_set = ShardSet.open(directory)
    samples = shard_set.split(split)
    count = min(MAX_ROWS, len(shard_set.classes))
    rows = np.linspace(0, len(shard_set.classes) - 1, count).round().astype(int)
    step = CELL_PIXELS + GAP_PIXELS
    sheet = Image.new("RGB", (GAP_PIXELS + COLUMNS * step, GAP_PIXELS + count * (step + CAPTION_PIXELS)), "white")
    draw = ImageDraw.Draw(sheet)
    for line, label in enumerate(rows):
        top = GAP_PIXELS + line * (step + CAPTION_PIXELS)
        name = shard_set.classes[label].encode("latin-1", "replace").decode("latin-1")
        draw.text((GAP_PIXELS, top), name, fill="black")
        for column, i in enumerate(np.flatnonzero(samples.labels == label)[:COLUMNS]):
            sheet.paste(_thumbnail(samples, int(i)), (GAP_PIXELS + column * step, top + CAPTION_PIXELS))
    sheet.save(path, "PNG")
    return path


def _thumbnail(samples: Split, i: int) -> Image.Image:
    with Image.open(io.BytesIO(samples.read(i).tobytes()), formats=("JPEG", "PNG")) as picture:
        picture.draft("RGB", (CELL_PIXELS, CELL_PIXELS))
        small = min(picture.size) < MIN_SMOOTHED_SIDE
        method = Image.Resampling.NEAREST if small else Image.Resampling.BILINEAR
        return ImageOps.pad(picture.convert("RGB"), (CELL_PIXELS, CELL_PIXELS), method=method, color="#e0e0e0")
