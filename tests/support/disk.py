"""Small file systems (tmpfs) to fill up; mounting needs root."""

import ctypes
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_READ_ONLY, _REMOUNT, _DETACH = 1, 32, 2


@contextmanager
def small_disk(directory: Path, size: str) -> Iterator[Path]:
    """Mount a file system of `size` (such as 80m) at `place`, which is created if missing. Raises OSError."""
    directory.mkdir(exist_ok=True)
    _mount(directory, 0, f"size={size}")
    try:
        yield directory
    finally:
        _LIBC.umount2(bytes(directory), _DETACH)


def may_not_mount() -> str | None:
    """Return the reason why this process may not mount, or None if it may."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            with small_disk(Path(folder), "1m"):
                return None
        except OSError as error:
            return f"cannot mount a tmpfs here: {error.strerror}"


def make_read_only(directory: Path) -> None:
    _mount(directory, _REMOUNT | _READ_ONLY, "")


def fill(disk: Path, leave: float = 0.0) -> Path:
    """Fill the disk except for the fraction `leave` of it; return the file that fills it."""
    ballast = disk / "ballast"
    usage = os.statvfs(disk)
    spare = int(leave * usage.f_blocks * usage.f_frsize)
    with ballast.open("ab", buffering=0) as file:
        for size in (2**20, 4096, 1):
            while _free(disk) >= spare + size:
                try:
                    file.write(b"\0" * size)
                except OSError:
                    break
    return ballast


def _free(disk: Path) -> int:
    usage = os.statvfs(disk)
    return usage.f_bavail * usage.f_frsize


def _mount(directory: Path, flags: int, options: str) -> None:
    if _LIBC.mount(b"tmpfs", bytes(directory), b"tmpfs", flags, options.encode()) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
