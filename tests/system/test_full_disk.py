"""A disk that fills up while `podscale run` trains, and class maps that do not fit: what is complete survives, and the
same command continues once there is room (mounting needs root)."""

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from podscale.checkpoint.layout import complete_entries, read_snapshot
from podscale.errors import ExitCode
from tests.support.commands import SMALL_DIGITS, Command, podscale

LIBC = ctypes.CDLL(None, use_errno=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 80 MiB; skips where this process may not mount."""
    place = tmp_path / "disk"
    place.mkdir()
    if LIBC.mount(b"tmpfs", bytes(place), b"tmpfs", 0, b"size=80m") != 0:
        pytest.skip(f"cannot mount a tmpfs here: {os.strerror(ctypes.get_errno())}")
    yield place
    LIBC.umount2(bytes(place), 2)  # MNT_DETACH


def fill(disk: Path) -> Path:
    """Takes every byte that is left."""
    ballast = disk / "ballast"
    with ballast.open("ab", buffering=0) as file:
        for size in (2**20, 4096, 1):
            while True:
                try:
                    file.write(b"\0" * size)
                except OSError:
                    break
    return ballast


@pytest.mark.slow
def test_a_disk_that_fills_up_during_training(disk: Path, tmp_path: Path) -> None:
    document = tmp_path / "run.yaml"
    document.write_text(SMALL_DIGITS)
    options = ["run", str(document), "--set", "launch.processes=1"]
    command = Command(disk, *options)
    try:
        run = disk / "runs" / "small"
        command.wait_for_updates(run, 8)
        ballast = fill(disk)
        ended = command.end()
    finally:
        command.kill()
    assert ended.code == ExitCode.FAILED, ended.err
    assert "No space left on device" in ended.last
    assert "the same command continues" in ended.last
    assert "Traceback" not in ended.err + ended.out
    kept = complete_entries(run / "checkpoints")
    assert kept
    steps = [read_snapshot(entry).step for entry in kept]  # whole, by their hashes
    ballast.unlink()
    ended = podscale(disk, *options)
    assert ended.code == ExitCode.DONE, ended.err
    assert f'"event": "resumed", "step": {max(steps)}' in ended.out
