"""Merge the records of all shards into the index, the lists of rejects and duplicates and, last, the manifest."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from podscale.config.data import DataSection
from podscale.config.fields import FieldClass
from podscale.config.identity import data_fingerprint, field_values
from podscale.data import index
from podscale.data.index import JPEG, ImageFlag
from podscale.data.manifest import SCHEMA_VERSION, Shard, ShardSetManifest, SplitSummary, classes_sha256
from podscale.data.sharding.pack import explain_write_errors
from podscale.data.sharding.shard_plan import SPLITS, ShardPlan
from podscale.data.sharding.shard_record import RECORD_COLUMNS, ShardRecord
from podscale.data.sources.base import decode_name
from podscale.errors import InputError
from podscale.util.files import write_atomically, write_json

REJECTS_FILE, DUPLICATES_FILE, CLASSES_FILE = "rejects.jsonl", "duplicates.jsonl", "classes.json"

RecordsBySplit = dict[str, list[ShardRecord]]


def merge_shards(directory: Path, plan: ShardPlan, data: DataSection, records: RecordsBySplit) -> ShardSetManifest:
    """Complete a shard set; raises InputError for too many rejects, forbidden duplicates, or a class without images."""
    with explain_write_errors(directory):
        rejects = write_rejects(directory, plan, records)
        check_rejects(directory, plan, data, rejects)
        columns = {split: _concatenate_columns(parts) for split, parts in records.items()}
        groups = _find_duplicates(columns)
        _flag_dropped(columns, groups, data)
        write_atomically(directory / DUPLICATES_FILE, "".join(_duplicate_lines(columns, groups, plan)))
        duplicates = _count_duplicates(columns, groups)
        if data.dedup == "fail" and groups:
            raise InputError(
                f"{len(groups)} groups of byte-identical images, listed in {directory / DUPLICATES_FILE}",
                field="data.source",
                got=data.source,
                hint="Remove them, or set data.dedup to report or drop.",
            )
        _check_classes(columns, plan, data)
        splits = {split: _write_split(directory, split, plan, columns[split], records[split]) for split in SPLITS}
        write_json(directory / CLASSES_FILE, plan.classes)
        _remove_leftovers(directory, plan)
        manifest = ShardSetManifest(
            schema_version=SCHEMA_VERSION,
            data_fingerprint=data_fingerprint(data),
            plan_fingerprint=plan.fingerprint,
            options=field_values(data, FieldClass.RESULT),
            classes_sha256=classes_sha256(plan.classes),
            splits=splits,
            rejects=dict(sorted(rejects.items())),
            duplicates=duplicates,
        )
        manifest.write(directory)
    return manifest


def write_rejects(directory: Path, plan: ShardPlan, records: RecordsBySplit) -> Counter[str]:
    """Write rejects.jsonl in key order; return the number of rejects by reason."""
    reasons: Counter[str] = Counter()
    lines = []
    names = plan.source_names
    for split, parts in records.items():
        for record in parts:
            for reject in record.rejects:
                reasons[reject.reason] += 1
                entry = {
                    "key": reject.key,
                    "split": split,
                    "class": plan.classes[plan.columns["label"][reject.key]],
                    "source": decode_name(names[reject.key]),
                    "reason": reject.reason,
                    "detail": reject.detail,
                }
                lines.append(json.dumps(entry, ensure_ascii=True) + "\n")
    write_atomically(directory / REJECTS_FILE, "".join(lines))
    return reasons


def check_rejects(directory: Path, plan: ShardPlan, data: DataSection, reasons: Counter[str]) -> None:
    rejected = reasons.total()
    if rejected > data.max_reject_rate * len(plan):
        listed = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
        raise InputError(
            f"{rejected} of {len(plan)} images of {data.source} are unusable ({listed}), listed in "
            f"{directory / REJECTS_FILE}",
            field="data.max_reject_rate",
            got=data.max_reject_rate,
            hint="Repair or remove them, set data.policy=convert, or allow more.",
        )


def _concatenate_columns(records: Sequence[ShardRecord]) -> dict[str, npt.NDArray[Any]]:
    return {name: np.concatenate([record.columns[name] for record in records]) for name in RECORD_COLUMNS}


@dataclass(frozen=True)
class _DuplicateGroup:
    """Byte-identical images as (split, row); `data.dedup=drop` keeps the first."""

    digest: str
    members: tuple[tuple[str, int], ...]
    conflicting: bool


def _find_duplicates(columns: dict[str, dict[str, npt.NDArray[Any]]]) -> list[_DuplicateGroup]:
    """Return groups of equal xxh3-128, ordered by first key; validation images come first, so one of them is kept."""
    high, low, key, label = (
        np.concatenate([columns[split][name] for split in SPLITS])
        for name in ("digest_high", "digest_low", "key", "label")
    )
    split = np.concatenate([np.full(len(columns[name]["key"]), number) for number, name in enumerate(SPLITS)])
    row = np.concatenate([np.arange(len(columns[name]["key"])) for name in SPLITS])
    order = np.lexsort((key, -split, low, high))  # within a group: validation first, then by key
    same = (high[order][1:] == high[order][:-1]) & (low[order][1:] == low[order][:-1])
    groups = []
    starts = np.flatnonzero(same & ~np.concatenate([[False], same])[:-1])
    for start in starts:
        stop = int(start) + 1
        while stop < len(order) and same[stop - 1]:
            stop += 1
        chosen = order[int(start) : stop]
        members = tuple((SPLITS[split[i]], int(row[i])) for i in chosen)
        digest = f"{int(high[chosen[0]]):016x}{int(low[chosen[0]]):016x}"
        groups.append((int(key[chosen].min()), _DuplicateGroup(digest, members, len(set(label[chosen].tolist())) > 1)))
    return [group for _, group in sorted(groups, key=lambda pair: pair[0])]


def _flag_dropped(
    columns: dict[str, dict[str, npt.NDArray[Any]]], groups: Sequence[_DuplicateGroup], data: DataSection
) -> None:
    """Flag all but the first image of each group if data.dedup is `drop`."""
    if data.dedup == "drop":
        for group in groups:
            for split, row in group.members[1:]:
                columns[split]["flags"][row] |= ImageFlag.DROPPED


def _count_duplicates(
    columns: dict[str, dict[str, npt.NDArray[Any]]], groups: Sequence[_DuplicateGroup]
) -> dict[str, int]:
    across = [group for group in groups if len({split for split, _ in group.members}) > 1]
    dropped = sum(int(((columns[split]["flags"] & ImageFlag.DROPPED) != 0).sum()) for split in SPLITS)
    return {
        "inside": len(groups) - len(across),
        "across": len(across),
        "conflicting": sum(group.conflicting for group in groups),
        "dropped": dropped,
    }


def _duplicate_lines(
    columns: dict[str, dict[str, npt.NDArray[Any]]], groups: Sequence[_DuplicateGroup], plan: ShardPlan
) -> Iterator[str]:
    names = plan.source_names
    for group in groups:
        images = []
        for split, row in group.members:
            of_split = columns[split]
            images.append(
                {
                    "key": int(of_split["key"][row]),
                    "split": split,
                    "class": plan.classes[of_split["label"][row]],
                    "source": decode_name(names[int(of_split["key"][row])]),
                    "dropped": bool(of_split["flags"][row] & ImageFlag.DROPPED),
                }
            )
        entry = {"digest": group.digest, "conflicting": group.conflicting, "images": images}
        yield json.dumps(entry, ensure_ascii=True) + "\n"


def _class_counts(columns: dict[str, npt.NDArray[Any]], classes: int) -> npt.NDArray[np.int64]:
    used = (columns["flags"] & ImageFlag.DROPPED) == 0
    return np.bincount(columns["label"][used], minlength=classes)


def _check_classes(columns: dict[str, dict[str, npt.NDArray[Any]]], plan: ShardPlan, data: DataSection) -> None:
    for split in SPLITS:
        empty = np.flatnonzero(_class_counts(columns[split], len(plan.classes)) == 0)
        if len(empty):
            raise InputError(
                f"class {plan.classes[empty[0]]!r} has no usable image left in the {split} split "
                f"(see {REJECTS_FILE} and {DUPLICATES_FILE})",
                field="data.source",
                got=data.source,
                hint="Add images or remove the class.",
            )


def _write_split(
    directory: Path, split: str, plan: ShardPlan, columns: dict[str, npt.NDArray[Any]], records: Sequence[ShardRecord]
) -> SplitSummary:
    """Write the index, source names and DALI index files of one split."""
    content = index.encode_index({name: columns[name] for name in index.INDEX_COLUMNS})
    write_atomically(directory / split / "index", content)
    names = plan.source_names
    write_atomically(
        directory / split / "sources", index.SourceNames.encode([names[int(key)] for key in columns["key"]])
    )
    shards = []
    for shard, record in enumerate(records):
        name = plan.shard_name(split, shard)
        write_atomically((directory / split / name).with_suffix(".idx"), dali_index(record))
        shards.append(Shard(name, len(record), record.bytes, record.sha256))
    counts = _class_counts(columns, len(plan.classes))
    return SplitSummary(
        count=int(counts.sum()),
        bytes=sum(record.bytes for record in records),
        class_counts=tuple(int(count) for count in counts),
        index_sha256=sha256(content).hexdigest(),
        shards=tuple(shards),
    )


def dali_index(record: ShardRecord) -> str:
    """Return the index of a shard for DALI's readers.webdataset.

    A line per sample has extension, offset, size (both in bytes) and name of its image, then of its label.
    """
    lines = [f"v1.2 {len(record)}"]
    columns = [record.columns[name].tolist() for name in ("key", "offset", "size", "label", "format")]
    for key, offset, size, label, form in zip(*columns, strict=True):
        ending = "jpg" if form == JPEG else "png"
        after = offset + size + -size % 512 + 512
        lines.append(f"{ending} {offset} {size} {key:08d}.{ending} cls {after} {len(str(label))} {key:08d}.cls")
    return "\n".join(lines) + "\n"


def _remove_leftovers(directory: Path, plan: ShardPlan) -> None:
    """Remove shards, records and temporary files of an earlier plan or a killed packer."""
    for split in SPLITS:
        names = {plan.shard_name(split, shard).removesuffix(".tar") for shard in range(plan.shard_count(split))}
        for folder in (directory / split, directory / "records" / split):
            for path in folder.iterdir():
                is_other_plan = path.stem not in names and path.name.startswith("shard-")
                if is_other_plan or (path.name.startswith(".") and path.name.endswith(".tmp")):
                    path.unlink(missing_ok=True)
    for path in directory.glob(".*.tmp"):
        path.unlink(missing_ok=True)
