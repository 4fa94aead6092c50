"""Files that several processes use: atomic writes, durable renames, locks and hashes.

An atomic write gives a reader the old content or the new. The kernel releases a lock when its holder exits, even after
kill -9.
"""

import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, BinaryIO


@contextmanager
def open_atomically(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file beside `path`; at the end of the block it takes that name by fsync and rename.

    After an error it is deleted. Its name is unique, so several processes may write `path` at the same time. The
    directory must exist.
    """
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.fchmod(file.fileno(), 0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


def write_atomically(path: Path, content: bytes | str) -> None:
    """Write `path` through a temporary file beside it, fsync and rename; the directory must exist."""
    with open_atomically(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def write_json(path: Path, value: Any) -> None:
    write_atomically(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def fsync_directory(path: Path) -> None:
    """Make renames inside `path` durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def file_lock(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold the exclusive lock of a file. Without `wait`, raises BlockingIOError if another process holds it."""
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def remove_unused(path: Path) -> bool:
    """Remove a file unless a process locks it. Returns True if it is gone."""
    with suppress(FileNotFoundError), path.open("r+b") as file:  # writable: NFS refuses other exclusive locks
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        if not is_same_file(file, path):
            return False  # removed by another process, and written again
        path.unlink()
    return True


def is_same_file(file: BinaryIO, path: Path) -> bool:
    """Return True if `path` still names the open file."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal digits, read in parts."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
