"""Code of the user that travels with a run: <workspace>/code/<sha256>.tar, and its import path.

The archive is stored once for each content. Every launch unpacks it into a temporary folder, read-only, and puts that
first on the import path of this process and of all that it starts. A model directory has a copy, so that it can be
used elsewhere.
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from podscale.config import RunConfig
from podscale.config.identity import Difference
from podscale.errors import InputError
from podscale.runs.directory import local_path
from podscale.util.code_archive import CodeArchive, changed_files, pack_code
from podscale.util.files import write_atomically

MODEL_CODE = "code.tar"
"""Name of the archive in a model directory."""
MAX_LISTED = 20
"""Files that an error lists."""
FOLDER_PREFIX = "podscale-code-"
"""Prefix of the temporary folders with unpacked code."""


def archive_path(workspace: str, sha256: str) -> Path:
    """Return the path of an archive in a workspace."""
    return local_path(workspace) / "code" / f"{sha256}.tar"


def find_archive(config: RunConfig) -> CodeArchive | None:
    """Return the archive of a run from the workspace, its document or launch.code, and store it in the workspace.

    None for a run without code. Raises InputError if it is nowhere, or if launch.code has changed meanwhile.
    """
    sha256 = config.run.code
    if sha256 is None:
        return None
    path = archive_path(config.run.workspace, sha256)
    if path.exists():
        hint = "Delete it; the next launch stores it again."
        return _checked(CodeArchive(path.read_bytes()), sha256, str(path), hint)
    launch = config.launch
    if launch.code_bundle is not None:
        hint = "Render or compile the document again."
        archive = _checked(CodeArchive.from_text(launch.code_bundle), sha256, "launch.code_bundle", hint)
    elif launch.code is not None and Path(launch.code).is_dir():
        hint = "Load the document again to run the present code, as a run of its own."
        archive = _checked(pack_code(Path(launch.code)), sha256, "launch.code", hint)
    elif (found := _code_of_members(config, sha256)) is not None:
        archive = found
    else:
        raise InputError(
            "the code of the run is not in its workspace",
            field=str(path),
            hint="Restore that file, or run once where the folder of launch.code is and the workspace is mounted.",
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, archive.data)
    except OSError as error:
        raise InputError(f"cannot store the code of the run: {error.strerror}", field=str(path)) from error
    return archive


def _code_of_members(config: RunConfig, sha256: str) -> CodeArchive | None:
    """Return the archive from one of the models that the document evaluates; None if none has it."""
    for name in config.evaluate.models:
        if (Path(name) / MODEL_CODE).exists():
            archive = CodeArchive((Path(name) / MODEL_CODE).read_bytes())
            if archive.sha256 == sha256:
                return archive
    return None


def _checked(archive: CodeArchive, sha256: str, field: str, hint: str) -> CodeArchive:
    if archive.sha256 != sha256:
        raise InputError(f"not the code of the run, whose hash is {sha256[:16]}", field=field, hint=hint)
    return archive


@contextmanager
def user_code(config: RunConfig) -> Iterator[None]:
    """Put the code of a run on the import path inside the block, of this process and of its children."""
    with imported_from(find_archive(config)):
        yield


@contextmanager
def imported_from(archive: CodeArchive | None) -> Iterator[None]:
    """Unpack an archive and put it first on the import path inside the block; None: do nothing.

    Modules of the same name that this process has imported, as in a notebook, are hidden meanwhile.
    """
    if archive is None:
        yield
        return
    folder = tempfile.mkdtemp(prefix=FOLDER_PREFIX)
    try:
        archive.unpack(Path(folder))
        with _first_on_path(folder), _imported_anew(archive.module_names()):
            yield
    finally:
        _remove(Path(folder))


@contextmanager
def _first_on_path(folder: str) -> Iterator[None]:
    """Put a folder first on the import path of this process and its children; blocks of several threads may overlap."""
    os.environ["PYTHONPATH"] = os.pathsep.join([folder, *_python_path()])
    # Otherwise `python -m`, which starts the ranks, puts the working directory before it; files there may be newer.
    os.environ.setdefault("PYTHONSAFEPATH", FOLDER_PREFIX)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path[:] = [path for path in sys.path if path != folder]
        rest = [path for path in _python_path() if path != folder]
        if rest:
            os.environ["PYTHONPATH"] = os.pathsep.join(rest)
        else:
            os.environ.pop("PYTHONPATH", None)
        is_last = not any(Path(path).name.startswith(FOLDER_PREFIX) for path in rest)
        if is_last and os.environ.get("PYTHONSAFEPATH") == FOLDER_PREFIX:
            del os.environ["PYTHONSAFEPATH"]


def _python_path() -> list[str]:
    return list(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))


@contextmanager
def _imported_anew(names: set[str]) -> Iterator[None]:
    """Forget the modules and packages of these names inside the block, and those that it imports after it."""
    fixed = {"__main__", "podscale", *(sys.stdlib_module_names & sys.modules.keys())}
    hidden = _forget_modules(names - fixed)
    try:
        yield
    finally:
        _forget_modules(names - fixed)
        sys.modules.update(hidden)


def _forget_modules(names: set[str]) -> dict[str, ModuleType]:
    """Remove packages with their modules from sys.modules; return those that were there."""
    return {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in names}


def _remove(folder: Path) -> None:
    for parent, _, _ in os.walk(folder):
        Path(parent).chmod(0o755)
    shutil.rmtree(folder, ignore_errors=True)


def code_of_model(directory: Path, config: RunConfig) -> CodeArchive | None:
    """Return the code of a model: that in its directory, else that of its run; None if it has none.

    Raises InputError if the one in the directory is not the code of the run.
    """
    path = directory / MODEL_CODE
    if not path.exists():
        return find_archive(config)
    archive = CodeArchive(path.read_bytes())
    if config.run.code is None:  # a model outside of a run
        return archive
    return _checked(archive, config.run.code, str(path), "Delete it; the code is then taken from the workspace.")


def copy_code_to_model(config: RunConfig, directory: Path) -> None:
    """Copy the code of a run into the directory of its model."""
    if (archive := find_archive(config)) is not None:
        write_atomically(directory / MODEL_CODE, archive.data)


def bundle_code(config: RunConfig) -> RunConfig:
    """Return the document with its code inside, for pods, if it is small; larger code must be in the workspace."""
    launch = config.launch
    if config.run.code is None or launch.code_bundle is not None:
        return config
    if launch.code is None or not Path(launch.code).is_dir():
        return config
    archive = pack_code(Path(launch.code))
    hint = "Load the document again."
    text = _checked(archive, config.run.code, "launch.code", hint).to_text()
    if text is None:
        return config
    return config.model_copy(update={"launch": launch.model_copy(update={"code_bundle": text})})


def describe_code_change(workspace: str, change: Difference) -> str:
    """Return the files that differ between two archives, one a line; "" if an archive is missing or damaged."""
    hashes = [str(change.before), str(change.now)]
    paths = [archive_path(workspace, sha256) for sha256 in hashes]
    if not all(path.exists() for path in paths):
        return ""
    before, now = (CodeArchive(path.read_bytes()) for path in paths)
    if [before.sha256, now.sha256] != hashes:
        return ""
    files = changed_files(before, now)
    more = [f"    and {len(files) - MAX_LISTED} more"] if len(files) > MAX_LISTED else []
    return "\n".join([*(f"    {name}" for name in files[:MAX_LISTED]), *more])
