"""checkpoints/step-<n>/: array files first, manifest.json last; without a valid manifest a checkpoint does not exist.

Nothing is renamed into place, so that the same layout works on object stores. The manifest carries the hash of every
file and, over its own content, of itself: a torn or damaged manifest is the same as none.
"""

import hashlib
import json
import os
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy.typing as npt

from podscale.checkpoint.arrayfile import WrittenFile, read_arrays
from podscale.checkpoint.identity import RunIdentity
from podscale.util.files import write_atomically

MANIFEST_FILE = "manifest.json"
SCHEMA_VERSION = 1
STEP_DIRECTORY_PATTERN = re.compile(r"^step-(\d+)$")


@dataclass(frozen=True)
class Snapshot:
    """The state of a run after `step` updates.

    arrays: `model/<catalogue name>` and `optimizer/<slot>/<parameter>`, OIHW fp32, independent of the world size.
    meta: JSON values: position, loss scale, counters.
    """

    step: int
    arrays: dict[str, npt.NDArray[Any]]
    meta: dict[str, Any]


@dataclass(frozen=True)
class CheckpointManifest:
    step: int
    identity: RunIdentity
    files: tuple[WrittenFile, ...]
    meta: dict[str, Any] = field(default_factory=dict)
    top1: float | None = None

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)


@dataclass(frozen=True)
class CheckpointEntry:
    """A checkpoint whose manifest is valid and whose files are there at their full size."""

    path: Path
    manifest: CheckpointManifest

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def top1(self) -> float | None:
        return self.manifest.top1


def step_directory(root: Path, step: int) -> Path:
    return root / f"step-{step}"


def steps_on_disk(root: Path) -> dict[int, Path]:
    """Every checkpoint directory by step, complete or not, newest first."""
    if not root.is_dir():
        return {}
    found = {int(match[1]): path for path in root.iterdir() if (match := STEP_DIRECTORY_PATTERN.match(path.name))}
    return dict(sorted(found.items(), reverse=True))


def manifest_bytes(manifest: CheckpointManifest) -> bytes:
    """The manifest as written, with the hash of its own content."""
    content = {"schema": SCHEMA_VERSION, **asdict(manifest)}
    return json.dumps({**content, "sha256": _digest(content)}, indent=1, allow_nan=False).encode() + b"\n"


def write_manifest(directory: Path, manifest: CheckpointManifest) -> None:
    """Makes the checkpoint exist: the last write, durable when it returns."""
    with (directory / MANIFEST_FILE).open("wb") as file:
        file.write(manifest_bytes(manifest))
        file.flush()
        os.fsync(file.fileno())


def replace_manifest(directory: Path, manifest: CheckpointManifest) -> None:
    """Changes what a complete checkpoint says of itself; it stays complete throughout."""
    write_atomically(directory / MANIFEST_FILE, manifest_bytes(manifest))


def read_entry(directory: Path) -> CheckpointEntry:
    """The checkpoint in `directory`; raises ValueError saying why it is not complete.

    Sizes are checked here, which is cheap; hashes when the arrays are read.
    """
    manifest = _read_manifest(directory / MANIFEST_FILE)
    for file in manifest.files:
        try:
            size = (directory / file.name).stat().st_size
        except OSError as error:
            raise ValueError(f"{file.name} is missing") from error
        if size != file.bytes:
            raise ValueError(f"{file.name} has {size} bytes instead of {file.bytes}")
    return CheckpointEntry(directory, manifest)


def complete_entries(root: Path) -> list[CheckpointEntry]:
    """The complete checkpoints, newest first."""
    entries = []
    for path in steps_on_disk(root).values():
        try:
            entries.append(read_entry(path))
        except ValueError:
            continue
    return entries


def read_snapshot(entry: CheckpointEntry) -> Snapshot:
    """Reads and verifies every array; raises ValueError where a file is damaged."""
    arrays: dict[str, npt.NDArray[Any]] = {}
    for file in entry.manifest.files:
        arrays.update(read_arrays(entry.path / file.name, file))
    return Snapshot(entry.step, arrays, entry.manifest.meta)


def _read_manifest(path: Path) -> CheckpointManifest:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ValueError("it was never finished (no manifest)") from None
    except OSError as error:
        raise ValueError(f"{path.name} cannot be read: {error.strerror or error}") from error
    except ValueError:
        raise ValueError(f"{path.name} is cut off or damaged") from None
    if not isinstance(content, dict) or content.pop("sha256", None) != _digest(content):
        raise ValueError(f"{path.name} does not match its sha256")
    if content.pop("schema") != SCHEMA_VERSION:
        raise ValueError(f"{path.name} has a layout this version does not know")
    files = tuple(WrittenFile(**file) for file in content.pop("files"))
    return CheckpointManifest(identity=RunIdentity(**content.pop("identity")), files=files, **content)


def _digest(content: dict[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
