"""Whether a shard set on disk is the one its manifest describes, found out by reading all of it."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from podscale.errors import InputError
from podscale.shards import index
from podscale.shards.manifest import ShardSetManifest
from podscale.util.progress_reports import ProgressCallback, ProgressReporter, ignore_progress


@dataclass(frozen=True)
class Damage:
    """A file that is not what the manifest says, relative to the set."""

    file: str
    problem: str

    def __str__(self) -> str:
        return f"{self.file}: {self.problem}"


def file_matches(path: Path, size: int, sha256: str) -> bool:
    """Whether a file is there with these bytes."""
    try:
        with path.open("rb") as file:
            return path.stat().st_size == size and hashlib.file_digest(file, "sha256").hexdigest() == sha256
    except OSError:
        return False


def verify_shard_set(
    directory: Path, manifest: ShardSetManifest, progress: ProgressCallback = ignore_progress
) -> list[Damage]:
    """Reads every shard and index; returns what is damaged, in manifest order."""
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
            elif len(index.SourceNames(directory / name / "sources", _row_count(path))) != _row_count(path):
                damage.append(Damage(f"{name}/sources", "has another number of rows than the index"))
        except (OSError, ValueError, InputError) as error:
            damage.append(Damage(f"{name}/index", f"cannot be read ({error})"))
    ticker.close()
    return damage


def _row_count(path: Path) -> int:
    return len(np.asarray(index.read_index(path)["key"]))
