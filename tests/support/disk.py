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
def small_disk(place: Path, size: str) -> Iterator[Path]:
    """A file system of `size` (such as 80m) at `place`, which is made where it is absent. Raises OSError."""
    place.mkdir(exist_ok=True)
    _mount(place, 0, f"size={size}")
    try:
        yield place
    finally:
        _LIBC.umount2(bytes(place), _DETACH)


def may_not_mount() -> str | None:
    """Why this process may not mount; None where it may."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            with small_disk(Path(folder), "1m"):
                return None
        except OSError as error:
            return f"cannot mount a tmpfs here: {error.strerror}"


def make_read_only(place: Path) -> None:
    _mount(place, _REMOUNT | _READ_ONLY, "")


def fill(disk: Path, leave: float = 0.0) -> Path:
    """Takes every byte that is left, but for the share `leave` of the disk; returns the file that does."""
    ballast = disk / "ballast"
    found = os.statvfs(disk)
    spare = int(leave * found.f_blocks * found.f_frsize)
    with ballast.open("ab", buffering=0) as file:
        for size in (2**20, 4096, 1):
            while _free(disk) >= spare + size:
                try:
                    file.write(b"\0" * size)
                except OSError:
                    break
    return ballast


def _free(disk: Path) -> int:
    found = os.statvfs(disk)
    return found.f_bavail * found.f_frsize


def _mount(place: Path, flags: int, options: str) -> None:
    if _LIBC.mount(b"tmpfs", bytes(place), b"tmpfs", flags, options.encode()) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
