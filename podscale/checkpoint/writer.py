"""Writes one checkpoint so that it is complete or does not exist."""

import errno
import os
import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy.typing as npt

from podscale.checkpoint.arrayfile import write_arrays
from podscale.checkpoint.identity import RunIdentity
from podscale.checkpoint.layout import MANIFEST_FILE, CheckpointManifest, Snapshot, step_directory, write_manifest
from podscale.errors import PodscaleError
from podscale.util.files import fsync_directory

DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
"""What a file system answers that has no room left for this user."""


def write_checkpoint(
    root: Path, snapshot: Snapshot, identity: RunIdentity, top1: float | None, fence: Callable[[], None]
) -> CheckpointManifest:
    """Writes step-<n>/ under `root`; durable when it returns.

    `fence` raises where another run has taken the directory over; it is asked before the first byte and again before
    the manifest. Raises PodscaleError where the file system refuses (full disk, quota); then nothing of this
    checkpoint is left and the earlier ones are untouched.
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
    except OSError as error:
        shutil.rmtree(directory, ignore_errors=True)
        raise _write_error_message(directory, snapshot, error) from error
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    return manifest


def remove_checkpoint(directory: Path) -> None:
    """Removes a checkpoint, its manifest first: one that is half removed no longer counts as complete."""
    if not directory.exists():
        return
    manifest = directory / MANIFEST_FILE
    if manifest.exists():
        manifest.unlink()
        fsync_directory(directory)
    shutil.rmtree(directory)


def _group_by_file(arrays: dict[str, npt.NDArray[Any]]) -> dict[str, dict[str, npt.NDArray[Any]]]:
    """One file for each first part of the names: model, optimizer."""
    groups: defaultdict[str, dict[str, npt.NDArray[Any]]] = defaultdict(dict)
    for name, array in arrays.items():
        groups[name.partition("/")[0]][name] = array
    return dict(groups)


def _write_error_message(directory: Path, snapshot: Snapshot, error: OSError) -> PodscaleError:
    reason = os.strerror(error.errno) if error.errno else str(error)
    hint = "Earlier checkpoints are untouched: the same command continues from the newest."
    if error.errno in DISK_FULL_ERRNOS:
        need = sum(array.nbytes for array in snapshot.arrays.values())
        hint = f"Free {need / 2**20:.1f} MiB or lower checkpoint.keep_last. {hint}"
    problem = f"the checkpoint of step {snapshot.step} could not be written: {reason}"
    return PodscaleError(problem, field=str(directory), hint=hint)
