"""Files of onnxruntime-web for a page, from the npm package that the lock file names by version and hashes."""

import base64
import hashlib
import json
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from podscale.config import RunConfig
from podscale.errors import InputError
from podscale.util import env
from podscale.util.files import file_sha256, write_atomically
from podscale.util.formatting import one_line

FETCH_SECONDS = 600.0
"""Time for npm to fetch the package, seconds."""
_FIELD = "--format html"


@dataclass(frozen=True)
class WebRuntime:
    """Contents of the JavaScript module and of the WebAssembly program, and their package as `name version`."""

    module: bytes
    program: bytes
    package: str


def load_web_runtime() -> WebRuntime:
    """Return the files of the lock file, from the user's cache or else from the package.

    The package is the archive in env.WEB_RUNTIME, else npm fetches it. Raises InputError if it cannot be had, or if a
    hash differs.
    """
    lock = read_lock()
    package = f"{lock['package']} {lock['version']}"
    directory = _cache_directory(lock)
    if not is_cached():
        _fill_cache(directory, lock)
    module, program = ((directory / Path(name).name).read_bytes() for name in lock["files"])
    return WebRuntime(module, program, package)


def read_lock() -> dict[str, Any]:
    """Return the package's name, version and hash, and the hashes of the files that a page needs."""
    lock: dict[str, Any] = json.loads((files("podscale.export") / "web/onnxruntime_web.lock.json").read_bytes())
    return lock


def is_cached() -> bool:
    """Return True if the user's cache has the files of the lock file."""
    lock = read_lock()
    directory, hashes = _cache_directory(lock), lock["files"]
    try:
        return all(file_sha256(directory / Path(name).name) == sha256 for name, sha256 in hashes.items())
    except OSError:
        return False


def runtime_problems(config: RunConfig) -> Iterator[InputError]:
    """Yield the problem of a document's page before its training: no runtime here, and no way to get it."""
    if config.export.page is None or is_cached():
        return
    name, archive = _npm_name(read_lock()), env.read_path(env.WEB_RUNTIME)
    writes = f"`npm pack {name}` writes"
    if archive is not None and not archive.is_file():
        hint = f"Put the archive there that {writes} (docs/how-to/export.md)."
        yield InputError("no such file", field=env.WEB_RUNTIME, got=str(archive), hint=hint)
    elif archive is None and shutil.which("npm") is None:
        yield InputError(
            f"a page needs {name}, and there is no npm to fetch it",
            field="export.formats",
            got=list(config.export.formats),
            hint=f"Set {env.WEB_RUNTIME} to the archive that {writes} on another machine (in pods: "
            "launch.cluster.env; docs/how-to/export.md), or remove the page.",
        )


def _npm_name(lock: dict[str, Any]) -> str:
    return f"{lock['package']}@{lock['version']}"


def _cache_directory(lock: dict[str, Any]) -> Path:
    return env.cache_directory(f"{lock['package']}-{lock['version']}")


def _fill_cache(directory: Path, lock: dict[str, Any]) -> None:
    """Write the files of the lock file into `directory`, after the archive and each file have the right hash."""
    with tempfile.TemporaryDirectory(prefix="podscale-npm-") as scratch:
        archive = env.read_path(env.WEB_RUNTIME) or _fetch(lock, Path(scratch))
        contents = _read_archive(archive, lock)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            write_atomically(directory / Path(name).name, content)
    except OSError as error:
        hint = "Set XDG_CACHE_HOME to a directory that you can write."
        raise InputError(f"cannot be written: {error.strerror}", field=str(directory), hint=hint) from error


def _fetch(lock: dict[str, Any], scratch: Path) -> Path:
    """Fetch the package with npm, by the user's own settings of registry and proxy."""
    npm, name = shutil.which("npm"), _npm_name(lock)
    offline = f"Set {env.WEB_RUNTIME} to the archive that `npm pack {name}` writes on another machine."
    if npm is None:
        raise InputError(f"needs npm to fetch {name}, which is not on the PATH", field=_FIELD, hint=offline)
    command = [npm, "pack", name, "--silent", "--pack-destination", str(scratch)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_SECONDS, cwd=scratch, check=False)
    except subprocess.TimeoutExpired as error:
        raise InputError(f"npm did not fetch {name} in {FETCH_SECONDS:.0f} s", field=_FIELD, hint=offline) from error
    archives = list(scratch.glob("*.tgz"))
    if done.returncode or not archives:
        problem = f"npm cannot fetch {name}: {one_line(done.stderr.strip() or 'no archive')}"
        raise InputError(problem, field=_FIELD, hint=offline)
    return archives[0]


def _read_archive(archive: Path, lock: dict[str, Any]) -> dict[str, bytes]:
    """Return the files of the lock file from an archive of npm. Raises InputError if a hash differs."""
    problem = f"not {lock['package']} {lock['version']} as the lock file has it"
    try:
        digest = hashlib.sha512(archive.read_bytes()).digest()
        if f"sha512-{base64.b64encode(digest).decode()}" != lock["integrity"]:
            raise InputError(problem, field=str(archive), hint=f"Fetch it with `npm pack {_npm_name(lock)}`")
        with tarfile.open(archive) as members:
            contents = {}
            for name, sha256 in lock["files"].items():
                member = members.extractfile(f"package/{name}")
                contents[name] = member.read() if member is not None else b""
                if hashlib.sha256(contents[name]).hexdigest() != sha256:
                    raise InputError(problem, field=f"{archive}: {name}")
    except (OSError, KeyError, tarfile.TarError) as error:
        raise InputError(f"cannot be read: {one_line(str(error))}", field=str(archive)) from error
    return contents
