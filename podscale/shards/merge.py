"""Merging: from the records of all shards to the index, the lists and, last of all, the manifest.

Everything here follows from plan and records alone, so that any packer, or two at once, may do it.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from podscale.config.fields import FieldClass
from podscale.config.identity import data_fingerprint, values_of
from podscale.config.model import DataSection
from podscale.errors import InputError
from podscale.files import write_atomically, write_json
from podscale.shards import index
from podscale.shards.index import JPEG, Flag
from podscale.shards.manifest import SCHEMA_VERSION, Manifest, Shard, SplitSummary, classes_sha256
from podscale.shards.pack import writing
from podscale.shards.plan import SPLITS, Plan
from podscale.shards.record import COLUMNS, Record
from podscale.shards.sources.base import class_name

REJECTS, DUPLICATES, CLASSES = "rejects.jsonl", "duplicates.jsonl", "classes.json"

Records = dict[str, list[Record]]


def merge(directory: Path, plan: Plan, data: DataSection, records: Records) -> Manifest:
    """Completes the shard set of these records, one list of all shards a split.

    Raises InputError where too many images are unusable, duplicates are forbidden, or a class lost all its images.
    """
    with writing(directory):
        rejects = write_rejects(directory, plan, records)
        check_rejects(directory, plan, data, rejects)
        columns = {split: _columns(parts) for split, parts in records.items()}
        groups = _duplicates(columns)
        _drop(columns, groups, data)
        write_atomically(directory / DUPLICATES, "".join(_duplicate_lines(columns, groups, plan)))
        duplicates = _count_duplicates(columns, groups)
        if data.dedup == "fail" and groups:
            raise InputError(
                f"{len(groups)} groups of byte-identical images, listed in {directory / DUPLICATES}",
                field="data.source",
                got=data.source,
                hint="Remove them, or set data.dedup to report or drop.",
            )
        _check_classes(columns, plan, data)
        splits = {split: _split(directory, split, plan, columns[split], records[split]) for split in SPLITS}
        write_json(directory / CLASSES, plan.classes)
        _remove_strangers(directory, plan)
        manifest = Manifest(
            schema_version=SCHEMA_VERSION,
            data_fingerprint=data_fingerprint(data),
            plan_fingerprint=plan.fingerprint,
            options=values_of(data, FieldClass.RESULT),
            classes_sha256=classes_sha256(plan.classes),
            splits=splits,
            rejects=dict(sorted(rejects.items())),
            duplicates=duplicates,
        )
        manifest.write(directory)
    return manifest


def write_rejects(directory: Path, plan: Plan, records: Records) -> Counter[str]:
    """Writes rejects.jsonl, in key order; returns how many there are by reason."""
    reasons: Counter[str] = Counter()
    lines = []
    names = plan.names
    for split, parts in records.items():
        for record in parts:
            for reject in record.rejects:
                reasons[reject.reason] += 1
                entry = {
                    "key": reject.key,
                    "split": split,
                    "class": plan.classes[plan.columns["label"][reject.key]],
                    "source": class_name(names[reject.key]),
                    "reason": reject.reason,
                    "detail": reject.detail,
                }
                lines.append(json.dumps(entry, ensure_ascii=True) + "\n")
    write_atomically(directory / REJECTS, "".join(lines))
    return reasons


def check_rejects(directory: Path, plan: Plan, data: DataSection, reasons: Counter[str]) -> None:
    """Raises InputError where more images are unusable than allowed."""
    rejected = reasons.total()
    if rejected > data.max_reject_rate * len(plan):
        listed = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
        raise InputError(
            f"{rejected} of {len(plan)} images of {data.source} are unusable ({listed}), listed in "
            f"{directory / REJECTS}",
            field="data.max_reject_rate",
            got=data.max_reject_rate,
            hint="Mend or remove them, set data.policy=convert, or allow more.",
        )


def _columns(records: Sequence[Record]) -> dict[str, npt.NDArray[Any]]:
    return {name: np.concatenate([record.columns[name] for record in records]) for name in COLUMNS}


@dataclass(frozen=True)
class _Group:
    """Byte-identical images: (split, row) of each, the one that is kept first."""

    digest: str
    members: tuple[tuple[str, int], ...]
    conflicting: bool


def _duplicates(columns: dict[str, dict[str, npt.NDArray[Any]]]) -> list[_Group]:
    """Groups of equal xxh3-128, in the order of their first key; a validation image is kept before a train one."""
    high, low, key, label = (
        np.concatenate([columns[split][name] for split in SPLITS])
        for name in ("digest_high", "digest_low", "key", "label")
    )
    split = np.concatenate([np.full(len(columns[name]["key"]), number) for number, name in enumerate(SPLITS)])
    row = np.concatenate([np.arange(len(columns[name]["key"])) for name in SPLITS])
    order = np.lexsort((key, -split, low, high))  # inside a group: validation first, then by key
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
        groups.append((int(key[chosen].min()), _Group(digest, members, len(set(label[chosen].tolist())) > 1)))
    return [group for _, group in sorted(groups, key=lambda pair: pair[0])]


def _drop(columns: dict[str, dict[str, npt.NDArray[Any]]], groups: Sequence[_Group], data: DataSection) -> None:
    """Flags all but the kept image of each group where the document asks for it."""
    if data.dedup == "drop":
        for group in groups:
            for split, row in group.members[1:]:
                columns[split]["flags"][row] |= Flag.DROPPED


def _count_duplicates(columns: dict[str, dict[str, npt.NDArray[Any]]], groups: Sequence[_Group]) -> dict[str, int]:
    across = [group for group in groups if len({split for split, _ in group.members}) > 1]
    dropped = sum(int(((columns[split]["flags"] & Flag.DROPPED) != 0).sum()) for split in SPLITS)
    return {
        "inside": len(groups) - len(across),
        "across": len(across),
        "conflicting": sum(group.conflicting for group in groups),
        "dropped": dropped,
    }


def _duplicate_lines(
    columns: dict[str, dict[str, npt.NDArray[Any]]], groups: Sequence[_Group], plan: Plan
) -> Iterator[str]:
    names = plan.names
    for group in groups:
        images = []
        for split, row in group.members:
            of_split = columns[split]
            images.append(
                {
                    "key": int(of_split["key"][row]),
                    "split": split,
                    "class": plan.classes[of_split["label"][row]],
                    "source": class_name(names[int(of_split["key"][row])]),
                    "dropped": bool(of_split["flags"][row] & Flag.DROPPED),
                }
            )
        entry = {"digest": group.digest, "conflicting": group.conflicting, "images": images}
        yield json.dumps(entry, ensure_ascii=True) + "\n"


def _counts(columns: dict[str, npt.NDArray[Any]], classes: int) -> npt.NDArray[np.int64]:
    used = (columns["flags"] & Flag.DROPPED) == 0
    return np.bincount(columns["label"][used], minlength=classes)


def _check_classes(columns: dict[str, dict[str, npt.NDArray[Any]]], plan: Plan, data: DataSection) -> None:
    for split in SPLITS:
        empty = np.flatnonzero(_counts(columns[split], len(plan.classes)) == 0)
        if len(empty):
            raise InputError(
                f"class {plan.classes[empty[0]]!r} has no usable image left in the {split} split "
                f"(see {REJECTS} and {DUPLICATES})",
                field="data.source",
                got=data.source,
                hint="Add images or remove the class.",
            )


def _split(
    directory: Path, split: str, plan: Plan, columns: dict[str, npt.NDArray[Any]], records: Sequence[Record]
) -> SplitSummary:
    """Writes the index, source names and DALI index files of one split."""
    content = index.encode({name: columns[name] for name in index.COLUMNS})
    write_atomically(directory / split / "index", content)
    names = plan.names
    write_atomically(directory / split / "sources", index.Sources.encode([names[int(key)] for key in columns["key"]]))
    shards = []
    for shard, record in enumerate(records):
        name = plan.shard_name(split, shard)
        write_atomically((directory / split / name).with_suffix(".idx"), dali_index(record))
        shards.append(Shard(name, len(record), record.bytes, record.sha256))
    counts = _counts(columns, len(plan.classes))
    return SplitSummary(
        count=int(counts.sum()),
        bytes=sum(record.bytes for record in records),
        class_counts=tuple(int(count) for count in counts),
        index_sha256=sha256(content).hexdigest(),
        shards=tuple(shards),
    )


def dali_index(record: Record) -> str:
    """The index of one tar that DALI's readers.webdataset reads: "v1.2 samples", then per sample and component
    its extension, offset and size in bytes, and member name."""
    lines = [f"v1.2 {len(record)}"]
    columns = [record.columns[name].tolist() for name in ("key", "offset", "size", "label", "format")]
    for key, offset, size, label, form in zip(*columns, strict=True):
        ending = "jpg" if form == JPEG else "png"
        after = offset + size + -size % 512 + 512
        lines.append(f"{ending} {offset} {size} {key:08d}.{ending} cls {after} {len(str(label))} {key:08d}.cls")
    return "\n".join(lines) + "\n"


def _remove_strangers(directory: Path, plan: Plan) -> None:
    """Removes shards, records and temporary files of an earlier plan or a killed packer."""
    for split in SPLITS:
        names = {plan.shard_name(split, shard).removesuffix(".tar") for shard in range(plan.shards(split))}
        for folder in (directory / split, directory / "records" / split):
            for path in folder.iterdir():
                stranger = path.stem not in names and path.name.startswith("shard-")
                if stranger or (path.name.startswith(".") and path.name.endswith(".tmp")):
                    path.unlink(missing_ok=True)
    for path in directory.glob(".*.tmp"):
        path.unlink(missing_ok=True)
