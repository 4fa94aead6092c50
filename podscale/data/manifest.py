"""Shard set manifest, and verification of the files it lists.

manifest.json is written last, so its presence means that the set is complete.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from podscale.errors import InputError
from podscale.util.files import file_sha256, write_json
from podscale.util.progress_reports import ProgressCallback, ProgressReporter, ignore_progress

MANIFEST_FILE = "manifest.json"
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class ShardPart:
    """Part of a shard set that one packer makes: every `count`-th shard, from `index` on."""

    index: int = 0
    count: int = 1

    def contains(self, number: int) -> bool:
        """Return whether a shard is in this part; shards are numbered from 0 over all splits."""
        return number % self.count == self.index


WHOLE_SHARD_SET = ShardPart()


@dataclass(frozen=True)
class Shard:
    """One tar file; its name is relative to the split."""

    name: str
    count: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class SplitSummary:
    """One split; its counts leave out dropped duplicates."""

    count: int
    bytes: int
    class_counts: tuple[int, ...]
    index_sha256: str
    shards: tuple[Shard, ...]


@dataclass(frozen=True)
class ShardSetManifest:
    """Manifest of a shard set. No field depends on when, where or with how many workers the set was packed."""

    schema_version: int
    data_fingerprint: str
    plan_fingerprint: str
    options: dict[str, Any]
    """Fields of the data section that decide the content of the set (field class `result`)."""
    classes_sha256: str
    splits: dict[str, SplitSummary]
    rejects: dict[str, int] = field(default_factory=dict)
    """Unusable images by reason; rejects.jsonl lists them."""
    duplicates: dict[str, int] = field(default_factory=dict)
    """Groups of duplicates `inside` one split, `across` splits, and `conflicting` (in label); images `dropped`."""

    @property
    def count(self) -> int:
        """Images in use, over all splits."""
        return sum(split.count for split in self.splits.values())

    def write(self, directory: Path) -> None:
        write_json(directory / MANIFEST_FILE, asdict(self))

    @classmethod
    def parse(cls, text: str, where: str) -> "ShardSetManifest":
        """Parse a manifest; raises InputError if the text is not a manifest of this schema version."""
        try:
            raw = json.loads(text)
            if raw["schema_version"] != SCHEMA_VERSION:
                raise InputError(
                    f"this Podscale reads shard sets of schema version {SCHEMA_VERSION}",
                    field=where,
                    got=raw["schema_version"],
                    hint="Shard the source again.",
                )
            splits = {
                name: SplitSummary(
                    **{
                        **split,
                        "class_counts": tuple(split["class_counts"]),
                        "shards": tuple(Shard(**shard) for shard in split["shards"]),
                    }
                )
                for name, split in raw.pop("splits").items()
            }
            return cls(splits=splits, **raw)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"not a shard manifest: {error}", field=where) from error


def classes_sha256(classes: list[str]) -> str:
    """Return the hash of a class map (names in index order), which shard sets, checkpoints and models record."""
    return hashlib.sha256(json.dumps(classes, ensure_ascii=True).encode()).hexdigest()


@dataclass(frozen=True)
class Damage:
    """File that differs from the manifest; `file` is its path relative to the set."""

    file: str
    problem: str

    def __str__(self) -> str:
        return f"{self.file}: {self.problem}"


def file_matches(path: Path, size: int, sha256: str) -> bool:
    try:
        return path.stat().st_size == size and file_sha256(path) == sha256
    except OSError:
        return False


def verify_shard_set(
    directory: Path, manifest: ShardSetManifest, progress: ProgressCallback = ignore_progress
) -> list[Damage]:
    """Read every shard and index; return the damage in manifest order."""
    from podscale.data import index  # loads NumPy, which readers of a manifest do without

    ticker = ProgressReporter("verify", progress, manifest.count)
    damage = []
    for name, split in manifest.splits.items():
        for shard in split.shards:
            path = directory / name / shard.name
            if not path.exists():
                damage.append(Damage(f"{name}/{shard.name}", "is missing"))
            elif not file_matches(path, shard.bytes, shard.sha256):
                damage.append(Damage(f"{name}/{shard.name}", "differs from its sha256 in the manifest"))
            ticker.add(shard.count, shard.bytes)
        path = directory / name / "index"
        try:
            if hashlib.sha256(path.read_bytes()).hexdigest() != split.index_sha256:
                damage.append(Damage(f"{name}/index", "differs from its sha256 in the manifest"))
                continue
            rows = len(index.read_index(path)["key"])
        except (OSError, InputError) as error:
            damage.append(Damage(f"{name}/index", f"cannot be read ({error})"))
            continue
        try:
            if len(index.SourceNames(directory / name / "sources", rows)) != rows:
                damage.append(Damage(f"{name}/sources", "does not have as many rows as the index"))
        except (OSError, ValueError) as error:
            damage.append(Damage(f"{name}/sources", f"cannot be read ({error})"))
    ticker.close()
    return damage
