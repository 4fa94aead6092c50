"""Checkpoint format: checkpoints/step-<n>/ with array files first and manifest.json last.

A checkpoint without a valid manifest does not count. The manifest has the hash of every file and of its own content.
Nothing is renamed into place, so the same layout works on object stores.
"""

import errno
import hashlib
import json
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy.typing as npt

from podscale.config.identity import add_later_options, differences
from podscale.errors import PodscaleError
from podscale.runs.checkpoint.array_file import WrittenFile, read_arrays, write_arrays
from podscale.util.files import fsync_directory, write_atomically


@dataclass(frozen=True)
class RunIdentity:
    """Values that a checkpoint and the run that resumes from it must share.

    Args:
        result: `config.result_values` of the run document.
        classes_sha256: Hash of the class map of the shard set.
        data_fingerprint: Fingerprint of the shard set's plan.
    """

    result: dict[str, Any]
    classes_sha256: str
    data_fingerprint: str

    def conflicts(self, saved: "RunIdentity") -> list[str]:
        """Return one line per difference from `saved`; empty if the run may resume."""
        before = add_later_options(saved.result, self.result)
        lines = [str(difference) for difference in differences(before, self.result)]
        if saved.classes_sha256 != self.classes_sha256:
            lines.append(
                f"class map: was {saved.classes_sha256[:12]}, is {self.classes_sha256[:12]} (the shard set has other "
                "classes or another order of them)"
            )
        if saved.data_fingerprint != self.data_fingerprint:
            lines.append(f"data fingerprint: was {saved.data_fingerprint}, is {self.data_fingerprint}")
        return lines


MANIFEST_FILE = "manifest.json"
SCHEMA_VERSION = 1
STEP_DIRECTORY_PATTERN = re.compile(r"^step-(\d+)$")


@dataclass(frozen=True)
class Snapshot:
    """State of a run after `step` steps.

    Args:
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
    """Checkpoint with a valid manifest, whose files exist at their full size."""

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
    """Return every checkpoint directory by step, complete or not, newest first."""
    if not root.is_dir():
        return {}
    paths = {int(match[1]): path for path in root.iterdir() if (match := STEP_DIRECTORY_PATTERN.match(path.name))}
    return dict(sorted(paths.items(), reverse=True))


def manifest_bytes(manifest: CheckpointManifest) -> bytes:
    """Return the file of a manifest, with the hash of its content."""
    content = {"schema": SCHEMA_VERSION, **asdict(manifest)}
    return json.dumps({**content, "sha256": _digest(content)}, indent=1, allow_nan=False).encode() + b"\n"


def write_manifest(directory: Path, manifest: CheckpointManifest) -> None:
    """Write the manifest, which completes the checkpoint; durable on return."""
    with (directory / MANIFEST_FILE).open("wb") as file:
        file.write(manifest_bytes(manifest))
        file.flush()
        os.fsync(file.fileno())


def replace_manifest(directory: Path, manifest: CheckpointManifest) -> None:
    write_atomically(directory / MANIFEST_FILE, manifest_bytes(manifest))


def read_entry(directory: Path) -> CheckpointEntry:
    """Return the checkpoint in `directory`, its sizes checked; raises ValueError if it is not complete."""
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
    """Return the complete checkpoints, newest first."""
    entries = []
    for path in steps_on_disk(root).values():
        try:
            entries.append(read_entry(path))
        except ValueError:
            continue
    return entries


def read_snapshot(entry: CheckpointEntry) -> Snapshot:
    """Read and verify every array; raises ValueError if a file is damaged."""
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
        raise ValueError(f"{path.name} has a format that this version does not read")
    files = tuple(WrittenFile(**file) for file in content.pop("files"))
    return CheckpointManifest(identity=RunIdentity(**content.pop("identity")), files=files, **content)


def _digest(content: dict[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)


def write_checkpoint(
    root: Path, snapshot: Snapshot, identity: RunIdentity, top1: float | None, fence: Callable[[], None]
) -> CheckpointManifest:
    """Write step-<n>/ under `root`, with the validation `top1` (a fraction) if it is known; durable on return.

    Calls `fence`, which raises if another launch has taken over, first, before the manifest, and before it removes
    what an error left. Raises PodscaleError for a full disk or quota; then nothing of this checkpoint is left.
    """
    directory = step_directory(root, snapshot.step)
    fence()
    try:
        root.mkdir(parents=True, exist_ok=True)
        remove_checkpoint(directory)
        directory.mkdir()
        files = tuple(
            write_arrays(directory / f"{group}.safetensors", arrays)
            for group, arrays in _group_by_file(snapshot.arrays).items()
        )
        fsync_directory(directory)
        fence()
        manifest = CheckpointManifest(snapshot.step, identity, files, snapshot.meta, top1)
        write_manifest(directory, manifest)
        fsync_directory(directory)
        fsync_directory(root)
    except BaseException as error:
        fence()  # after a takeover, the directory may be the newer launch's
        shutil.rmtree(directory, ignore_errors=True)
        if isinstance(error, OSError):
            raise write_error(directory, snapshot, error) from error
        raise
    return manifest


def remove_checkpoint(directory: Path) -> None:
    """Remove a checkpoint, its manifest first, so that half of it does not count as complete."""
    if not directory.exists():
        return
    manifest = directory / MANIFEST_FILE
    if manifest.exists():
        manifest.unlink()
        fsync_directory(directory)
    shutil.rmtree(directory)


def _group_by_file(arrays: dict[str, npt.NDArray[Any]]) -> dict[str, dict[str, npt.NDArray[Any]]]:
    """Return the arrays of each file, which is the first part of their names (model, optimizer)."""
    groups: defaultdict[str, dict[str, npt.NDArray[Any]]] = defaultdict(dict)
    for name, array in arrays.items():
        groups[name.partition("/")[0]][name] = array
    return dict(groups)


def write_error(directory: Path, snapshot: Snapshot, error: OSError) -> PodscaleError:
    """Return the error of a checkpoint that could not be written to `directory`."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    hint = "Earlier checkpoints are untouched: the same command continues from the newest."
    if error.errno in DISK_FULL_ERRNOS:
        need = sum(array.nbytes for array in snapshot.arrays.values())
        hint = f"Free {need / 2**20:.1f} MiB or lower checkpoint.keep_last. {hint}"
    problem = f"the checkpoint of step {snapshot.step} could not be written: {reason}"
    return PodscaleError(problem, field=str(directory), hint=hint)
