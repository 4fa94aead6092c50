"""Shard plan: the shard of every image, decided before any image is read.

The listing is sorted by name (bytes), so it does not depend on a file system or locale. Order and hold-out follow a
hash of name and seed (xxh3-64): an image stays in its split when others are added.
"""

import hashlib
import json
from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from podscale.config.data import DataSection
from podscale.data.sharding import file_formats
from podscale.data.sources import Source, SourceItem
from podscale.data.sources.base import TRAIN, VALIDATION, decode_name
from podscale.errors import InputError
from podscale.util.formatting import suggest_similar
from podscale.util.progress_reports import ProgressCallback, ProgressReporter, ignore_progress

PLAN_FILE = "plan"
PLAN_FORMAT = 1
"""Increase it when the same plan gives different bytes: shards of an older format are then packed again."""

SPLITS = (TRAIN, VALIDATION)
_CONTENT_OPTIONS = ("policy", "resize_short", "quality", "max_pixels", "max_bytes")
_ORDER_SALT, _SPLIT_SALT, _HOLDOUT_SALT, _SUBSET_SALT = b"order\0", b"split\0", b"holdout\0", b"subset\0"

IntArray = npt.NDArray[np.int64]


class PlannedImage(NamedTuple):
    key: int
    label: int
    item: SourceItem


@dataclass(frozen=True)
class ShardPlan:
    """Rows in packing order, train before validation; the row number is the sample's key."""

    fingerprint: str
    classes: list[str]
    bounds: dict[str, IntArray]
    """Per split: the first row of each shard, and the row after the last."""
    columns: dict[str, npt.NDArray[Any]]

    def __len__(self) -> int:
        return len(self.columns["label"])

    def shard_count(self, split: str) -> int:
        return len(self.bounds[split]) - 1

    def image_count(self, split: str, shard: int) -> int:
        """Number of images of a shard, unusable ones included."""
        return int(self.bounds[split][shard + 1] - self.bounds[split][shard])

    def shard_name(self, split: str, shard: int) -> str:
        return f"shard-{shard:05d}-of-{self.shard_count(split):05d}.tar"

    @property
    def source_names(self) -> file_formats.ByteStrings:
        return file_formats.ByteStrings(self.columns, "name")

    def entries(self, split: str, shard: int) -> Iterator[PlannedImage]:
        """Yield the images of one shard in order."""
        rows = slice(int(self.bounds[split][shard]), int(self.bounds[split][shard + 1]))
        # Lists, because reading single numbers from NumPy arrays costs more than all the rest here.
        labels, sizes = self.columns["label"][rows].tolist(), self.columns["size"][rows].tolist()
        byte_ranges: Iterable[tuple[int, int]] = repeat((0, 0))
        containers: Sequence[bytes] = (b"",)
        if "offset" in self.columns:
            containers = file_formats.ByteStrings(self.columns, "container")[:]
            byte_ranges = zip(self.columns["in"][rows].tolist(), self.columns["offset"][rows].tolist(), strict=True)
        images = zip(self.source_names[rows], labels, sizes, byte_ranges, strict=False)  # repeat() has no end
        for row, (name, label, size, (container, offset)) in enumerate(images, rows.start):
            yield PlannedImage(
                row, label, SourceItem(name, self.classes[label], size, split, containers[container], offset)
            )

    def shard_bytes(self, split: str) -> IntArray:
        """Return the planned size of each shard in bytes, an upper bound if nothing is converted."""
        sizes = np.concatenate([[0], np.cumsum(_packed_bytes(self.columns["size"]))])
        packed: IntArray = np.diff(sizes[self.bounds[split]])
        return packed

    def write(self, path: Path) -> None:
        header = {"kind": "plan", "format": PLAN_FORMAT, "fingerprint": self.fingerprint, "classes": self.classes}
        file_formats.write_columns(path, header, {**{f"bounds_{s}": b for s, b in self.bounds.items()}, **self.columns})

    @classmethod
    def read(cls, path: Path) -> "ShardPlan":
        """Read a plan, memory-mapped; raises InputError if the file is not a plan."""
        header, columns = file_formats.read_columns(path, "plan")
        bounds = {split: columns.pop(f"bounds_{split}").astype(np.int64) for split in SPLITS}
        return cls(header["fingerprint"], header["classes"], bounds, columns)


def plan_shards(source: Source, data: DataSection, progress: ProgressCallback = ignore_progress) -> ShardPlan:
    """List the source and decide split, order and shard of every image.

    Raises InputError if the source is empty, has only one class, has a class without images in a split, lists a name
    twice, has other classes than data.classes, or lacks one of data.only_classes.
    """
    listing = _Listing.read(source, ProgressReporter("list", progress), data.only_classes)
    if not listing.names and not listing.left_out:
        raise _refusal(data, "no images found (jpg, png, ... in class folders)", "Check the path.")
    _check_only_classes(listing, data)
    listing.check_duplicates(data)
    classes = _class_names(listing.classes, data)
    labels = np.asarray([classes.index(name) for name in listing.classes])[np.asarray(listing.labels)]
    names_hash = _name_hashes(listing.names, _SPLIT_SALT, data.seed)
    validation = _validation_mask(np.asarray(listing.splits), labels, names_hash, data)
    _check_classes(labels, validation, classes, data)
    order = np.lexsort((listing.sorted_rank(), _name_hashes(listing.names, _ORDER_SALT, data.seed), validation))
    if data.holdout_fraction is not None:
        order, validation = _hold_out_of_training(order, validation, labels, listing.names, data)
        _check_classes(labels[order], validation[order], classes, data)
    if data.images_per_class is not None:
        order = _limit_training_images(order, validation, labels, listing.names, data)
    columns = listing.columns(order)
    columns["label"] = labels[order].astype("<i4")
    train = len(order) - int(validation[order].sum())
    weights = _packed_bytes(columns["size"])
    bounds = {
        TRAIN: _shard_bounds(weights[:train], data, TRAIN),
        VALIDATION: _shard_bounds(weights[train:], data, VALIDATION) + train,
    }
    return ShardPlan(_fingerprint(classes, bounds, columns, data), classes, bounds, columns)


class _Listing:
    """Listing of a source in columns; a million images take about 200 MB."""

    def __init__(self) -> None:
        self.names: list[bytes] = []
        self.sizes, self.offsets = array("Q"), array("Q")
        self.labels, self.containers, self.splits = array("I"), array("I"), array("b")
        self.classes: list[str] = []
        self.container_names: list[bytes] = []
        self.left_out: set[str] = set()
        """Classes of the source whose images are not listed."""

    @classmethod
    def read(cls, source: Source, ticker: ProgressReporter, only: Collection[str] | None = None) -> "_Listing":
        """Read the listing of a source.

        Args:
            only: Classes whose images are listed; None for all.
        """
        listing = cls()
        wanted = None if only is None else frozenset(only)
        classes: dict[str, int] = {}
        containers: dict[bytes, int] = {}
        for item in source.items():
            if wanted is not None and item.label not in wanted:
                listing.left_out.add(item.label)
                continue
            listing.names.append(item.name)
            listing.sizes.append(item.size)
            listing.offsets.append(item.offset)
            listing.labels.append(classes.setdefault(item.label, len(classes)))
            listing.containers.append(containers.setdefault(item.container, len(containers)))
            listing.splits.append(SPLITS.index(item.split) if item.split else -1)
            ticker.add(1)
        ticker.close()
        listing.classes, listing.container_names = list(classes), list(containers)
        return listing

    def sorted_rank(self) -> IntArray:
        """Return the position of every name in the sorted listing."""
        order = sorted(range(len(self.names)), key=self.names.__getitem__)
        rank = np.empty(len(order), dtype=np.int64)
        rank[order] = np.arange(len(order))
        return rank

    def check_duplicates(self, data: DataSection) -> None:
        if len(set(self.names)) < len(self.names):
            seen: set[bytes] = set()
            twice = next(name for name in self.names if name in seen or seen.add(name))  # type: ignore[func-returns-value]
            raise _refusal(data, f"{decode_name(twice)} is listed twice", "Every image needs a name of its own.")

    def columns(self, order: IntArray) -> dict[str, npt.NDArray[Any]]:
        columns: dict[str, npt.NDArray[Any]] = {"size": np.asarray(self.sizes)[order].astype("<u8")}
        columns |= file_formats.pack_byte_strings("name", [self.names[row] for row in order])
        in_archives = any(self.offsets)  # byte ranges of archives; an archive that is the source itself is b""
        # containers are numbered by sorted name: the plan must not depend on the order of listing
        sorted_names = sorted(self.container_names) if in_archives else []
        columns |= file_formats.pack_byte_strings("container", sorted_names)
        if in_archives:
            rank = {name: number for number, name in enumerate(sorted_names)}
            numbers = np.asarray([rank[name] for name in self.container_names])
            columns["in"] = numbers[np.asarray(self.containers)][order].astype("<u4")
            columns["offset"] = np.asarray(self.offsets)[order].astype("<u8")
        return columns


def _packed_bytes(sizes: npt.NDArray[Any]) -> IntArray:
    """Return the bytes that images of these sizes take in a shard."""
    content: IntArray = sizes.astype(np.int64)
    packed: IntArray = content + (-content % file_formats.TAR_BLOCK_BYTES) + file_formats.tar_sample_bytes(0)
    return packed


def _name_hashes(names: Sequence[bytes], salt: bytes, seed: int) -> npt.NDArray[np.uint64]:
    digest = xxhash.xxh3_64_intdigest
    return np.fromiter((digest(salt + name, seed) for name in names), dtype=np.uint64, count=len(names))


def _class_names(listed: Sequence[str], data: DataSection) -> list[str]:
    """Return the class map: data.classes if given, else the sorted names found."""
    if len(listed) < 2:
        raise _refusal(data, f"only the class {listed[0]!r}", "A classifier needs at least two.")
    if data.classes is None:
        return sorted(listed, key=lambda name: name.encode())
    if len(set(data.classes)) < len(data.classes):
        raise InputError("a class is named twice", field="data.classes", got=list(data.classes))
    missing, extra = sorted(set(data.classes) - set(listed)), sorted(set(listed) - set(data.classes))
    if missing or extra:
        raise _refusal(
            data,
            f"its classes differ from data.classes (missing: {_first_names(missing)}, "
            f"unexpected: {_first_names(extra)})",
            "Correct the source or the document, or choose classes with data.only_classes.",
        )
    return list(data.classes)


def _check_only_classes(listing: _Listing, data: DataSection) -> None:
    """Raise InputError if the source lacks a class of `data.only_classes`."""
    absent = [name for name in data.only_classes or () if name not in listing.classes]
    if absent:
        known = sorted({*listing.classes, *listing.left_out})
        raise InputError(
            "the source has no image of this class",
            field="data.only_classes",
            got=absent[0],
            hint=suggest_similar(absent[0], known) or f"It has {_first_names(known)}.",
        )


def _refusal(data: DataSection, problem: str, hint: str) -> InputError:
    return InputError(problem, field="data.source", got=data.source, hint=hint)


def _first_names(names: Sequence[str]) -> str:
    return (", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")) or "none"


def _validation_mask(
    source_splits: npt.NDArray[np.int8], labels: IntArray, hashes: npt.NDArray[np.uint64], data: DataSection
) -> npt.NDArray[np.bool_]:
    """Return the mask of validation images: those that the source names, else those with the smallest hashes.

    Without `data.stratify`: hashes below a threshold, so no image changes its split when others are added. With it: the
    same fraction of each class, at least one image; adding an image moves at most one other.
    """
    if (source_splits == SPLITS.index(VALIDATION)).any():
        if (source_splits < 0).any():
            raise _refusal(data, "gives the split of some images only", "Give it for all or for none.")
        return np.equal(source_splits, SPLITS.index(VALIDATION))
    return _hash_mask(labels, hashes, data.validation_fraction, stratify=data.stratify)


def _hash_mask(
    labels: IntArray, hashes: npt.NDArray[np.uint64], fraction: float, *, stratify: bool
) -> npt.NDArray[np.bool_]:
    """Return the mask of a fraction of the images, those with the smallest hashes, of each class if `stratify`.

    Args:
        labels: int64 [n].
        hashes: uint64 [n], hash of each image's name.
        fraction: fraction of the images, between 0 and 1.
    """
    if not stratify:
        return np.less(hashes, np.uint64(int(fraction * 2**64)))
    counts = np.bincount(labels)
    share = np.maximum(np.floor(counts * fraction + 0.5).astype(np.int64), 1)
    mask: npt.NDArray[np.bool_] = _class_ranks(labels, hashes) < np.minimum(share, counts - 1)[labels]
    return mask


def _class_ranks(labels: IntArray, hashes: npt.NDArray[np.uint64]) -> IntArray:
    """Return the position of each image among those of its class by rising hash, int64 [n]."""
    order = np.lexsort((hashes, labels))
    counts = np.bincount(labels)
    rank = np.empty(len(labels), dtype=np.int64)
    rank[order] = np.arange(len(labels)) - np.repeat(np.cumsum(counts) - counts, counts)
    return rank


def _hold_out_of_training(
    order: IntArray, validation: npt.NDArray[np.bool_], labels: IntArray, names: Sequence[bytes], data: DataSection
) -> tuple[IntArray, npt.NDArray[np.bool_]]:
    """Leave the validation images out, and hold `data.holdout_fraction` of the others out in their place.

    Args:
        order: int64 [n], rows in packing order.
        validation: bool [n], mask of the validation images.
        labels: int64 [n].
        names: names of the images, by row.

    Returns:
        The order of the rows that are left, int64 [m], and the new mask, bool [n].
    """
    assert data.holdout_fraction is not None
    rows = np.flatnonzero(~validation)
    hashes = _name_hashes([names[row] for row in rows.tolist()], _HOLDOUT_SALT, data.seed)
    mask = np.zeros_like(validation)
    mask[rows] = _hash_mask(labels[rows], hashes, data.holdout_fraction, stratify=data.stratify)
    left = order[~validation[order]]
    return left[np.argsort(mask[left], kind="stable")], mask


def _limit_training_images(
    order: IntArray, validation: npt.NDArray[np.bool_], labels: IntArray, names: Sequence[bytes], data: DataSection
) -> IntArray:
    """Return the rows in packing order, with at most `data.images_per_class` training images of each class.

    A smaller number takes a subset of the images of a larger one.

    Args:
        order: int64 [n], rows in packing order.
        validation: bool [m], mask of the validation images, by row.
        labels: int64 [m].
        names: names of the images, by row.
    """
    assert data.images_per_class is not None
    rows = order[~validation[order]]
    hashes = _name_hashes([names[row] for row in rows.tolist()], _SUBSET_SALT, data.seed)
    kept = validation.copy()
    kept[rows] = _class_ranks(labels[rows], hashes) < data.images_per_class
    return order[kept[order]]


def _check_classes(labels: IntArray, validation: npt.NDArray[np.bool_], classes: list[str], data: DataSection) -> None:
    for split, chosen in ((TRAIN, ~validation), (VALIDATION, validation)):
        counts = np.bincount(labels[chosen], minlength=len(classes))
        absent = [classes[label] for label in np.flatnonzero(counts == 0)]
        if absent:
            raise _refusal(
                data,
                f"classes without an image in the {split} split: {_first_names(absent)}",
                "Every class needs images in both splits. Add images, remove the class, or see data.stratify and "
                "data.validation_fraction.",
            )


def _shard_bounds(weights: IntArray, data: DataSection, split: str) -> IntArray:
    """Return the first row of each shard, and the end; shards have nearly equal bytes and at least one image."""
    total = np.cumsum(weights)
    shards = max(data.min_shards, -(-int(total[-1]) // data.shard_bytes))
    if len(weights) < data.min_shards:
        raise InputError(
            f"the {split} split has only {len(weights)} images",
            field="data.min_shards",
            got=data.min_shards,
            hint="Ask for fewer shards.",
        )
    shards = min(shards, len(weights))
    inner = np.searchsorted(total, np.arange(1, shards) * (total[-1] / shards)) + 1
    bounds = np.concatenate([[0], inner, [len(weights)]]).astype(np.int64)
    steps = np.arange(shards + 1)
    bounds = np.maximum.accumulate(bounds - steps) + steps  # at least one image in each shard
    return np.minimum(bounds, len(weights) - shards + steps)


def _fingerprint(
    classes: list[str], bounds: dict[str, IntArray], columns: file_formats.Columns, data: DataSection
) -> str:
    options = {name: getattr(data, name) for name in _CONTENT_OPTIONS}
    digest = hashlib.sha256(json.dumps([PLAN_FORMAT, classes, options]).encode())
    for name, column in [*bounds.items(), *sorted(columns.items())]:
        digest.update(f"{name} {column.dtype.str} {len(column)}\n".encode())
        digest.update(np.ascontiguousarray(column).data)
    return digest.hexdigest()


def describe_changes(before: ShardPlan, now: ShardPlan) -> str:
    """Describe the differences between two listings of one source."""
    old = dict(zip(before.source_names, zip(before.columns["size"], before.columns["label"], strict=True), strict=True))
    new = dict(zip(now.source_names, zip(now.columns["size"], now.columns["label"], strict=True), strict=True))
    parts = []
    for word, names in (
        ("added", new.keys() - old.keys()),
        ("removed", old.keys() - new.keys()),
        ("changed", {name for name in old.keys() & new.keys() if old[name] != new[name]}),
    ):
        if names:
            parts.append(f"{len(names)} {word} (such as {decode_name(min(names))})")
    return ", ".join(parts) or "the split or the class map differs"
