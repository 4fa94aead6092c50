"""File locks between processes. The kernel releases them when the holder exits, even after kill -9."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


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
