"""Preflight checks of the source, the shard set and the workspace."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from podscale.config.identity import data_fingerprint
from podscale.config.run_config import RunConfig
from podscale.errors import InputError
from podscale.util.formatting import format_bytes
from podscale.util.locations import Location

MAX_MEASURED_FILES = 20_000
"""Maximal number of source files that are measured to estimate the size of the shards."""
SPARE_BYTES = 64 * 2**20
"""Space for index, report and logs, bytes."""


def storage_problems(document: RunConfig, shard_set: str | None) -> Iterator[InputError]:
    """Yield the problems of the workspace, and of the shard set or, if there is none, of the source."""
    if shard_set is None:
        yield from _source_problems(document)
    elif Location.parse(shard_set).local_path is not None and not shard_set_counts(document, shard_set):
        hint = "Run `podscale shard`, or name another with --shard-set."
        yield InputError("no complete shard set here", field=shard_set, hint=hint)
    yield from _workspace_problems(document)


def shard_set_counts(document: RunConfig, shard_set: str | None = None) -> dict[str, int]:
    """Return the samples of `shard_set` (default: the document's) by split; empty if it is not complete here."""
    default = Location.parse(document.run.workspace).join("datasets", data_fingerprint(document.data))
    directory = (default if shard_set is None else Location.parse(shard_set)).local_path
    if directory is None:
        return {}
    try:
        splits = json.loads((directory / "manifest.json").read_text(encoding="utf-8"))["splits"]
        return {name: int(split["count"]) for name, split in splits.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}  # the shard stage reports a damaged manifest


def _source_problems(document: RunConfig) -> Iterator[InputError]:
    source = _unpacked_source(document)
    if source is None:
        return
    try:
        is_folder = source.is_dir()
        if is_folder and not os.access(source, os.R_OK | os.X_OK):
            yield InputError("this user may not read it", field="data.source", got=str(source))
        elif is_folder and next(source.iterdir(), None) is None:
            hint = "It must hold one folder per class (or train/ and val/)."
            yield InputError("the folder is empty", field="data.source", got=str(source), hint=hint)
        elif not is_folder and not source.exists():
            problem = f"does not exist, the nearest folder that does is {_nearest_existing(source)}"
            yield InputError(problem, field="data.source", got=str(source), hint="Set data.source=<folder>")
    except OSError as error:
        yield InputError(f"cannot be read: {error.strerror}", field="data.source", got=str(source))


def _unpacked_source(document: RunConfig) -> Path | None:
    """Return the local source if it is still to be packed."""
    if not document.data.source_is_location or shard_set_counts(document):
        return None
    return Location.parse(document.data.source).local_path


def _nearest_existing(path: Path) -> Path:
    return next((p for p in (path.absolute(), *path.absolute().parents) if p.exists()), Path("/"))


def _workspace_problems(document: RunConfig) -> Iterator[InputError]:
    workspace = Location.parse(document.run.workspace).local_path
    problem, hint = "", "Choose another run.workspace."
    if workspace is None:
        problem, hint = "a run directory needs a local or mounted file system", "Mount the bucket and give its path."
    else:
        existing = _nearest_existing(workspace)
        if not existing.is_dir():
            problem = f"{existing} is a file"
        elif os.statvfs(existing).f_flag & os.ST_RDONLY or not os.access(existing, os.W_OK | os.X_OK):
            problem = f"{existing} cannot be written"
        elif (free := shutil.disk_usage(existing).free) < (needed := _required_disk_bytes(document)):
            problem = f"{format_bytes(free)} free, about {format_bytes(needed)} needed"
            hint = "Free some space or choose another run.workspace."
    if problem:
        yield InputError(problem, field="run.workspace", got=document.run.workspace, hint=hint)


def _required_disk_bytes(document: RunConfig) -> int:
    """Return a lower bound of the bytes that the run writes: images to pack, unless they are resized."""
    source = _unpacked_source(document)
    return SPARE_BYTES + (_measure_bytes(source) if source is not None and not document.data.resize_short else 0)


def _measure_bytes(source: Path) -> int:
    """Return the bytes of a file, or of the first MAX_MEASURED_FILES files of a folder."""
    if source.is_file():
        return source.stat().st_size
    total = seen = 0
    for directory, _, names in os.walk(source):
        for name in names:
            try:
                total += os.lstat(os.path.join(directory, name)).st_size  # noqa: PTH118, a Path per file is slow
            except OSError:
                continue
            seen += 1
            if seen >= MAX_MEASURED_FILES:
                return total
    return total
