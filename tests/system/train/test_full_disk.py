"""A disk that fills up while `podscale run` trains: complete files survive, and the same command continues later.

Workspaces that are full or read-only from the start are refused (mounting needs root).
"""

import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from podscale.errors import ExitCode
from podscale.runs.checkpoint.format import complete_entries, read_snapshot
from tests.support.commands import SMALL_DIGITS, Command, podscale
from tests.support.disk import fill, make_read_only, may_not_mount, small_disk


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """File system of 80 MiB; skips if this process may not mount."""
    if (refused := may_not_mount()) is not None:
        pytest.skip(refused)
    with small_disk(tmp_path / "disk", "80m") as mounted:
        yield mounted


@pytest.mark.slow
def test_a_disk_that_fills_up_during_training(disk: Path, tmp_path: Path) -> None:
    document = tmp_path / "run.yaml"
    document.write_text(SMALL_DIGITS)
    options = ["run", str(document), "--set", "launch.processes=1"]
    command = Command(disk, *options)
    try:
        run = disk / "runs" / "small"
        command.wait_for_steps(run, 8)
        ballast = fill(disk)
        ended = command.end()
    finally:
        command.kill()
    assert ended.code == ExitCode.FAILED, ended.err
    assert os.strerror(errno.ENOSPC) in ended.last
    assert "Traceback" not in ended.err + ended.out
    checkpoints = complete_entries(run / "checkpoints")
    assert checkpoints
    steps = [read_snapshot(entry).step for entry in checkpoints]  # complete, by their hashes
    ballast.unlink()
    ended = podscale(disk, *options)
    assert ended.code == ExitCode.DONE, ended.err
    assert f'"event": "resumed", "step": {max(steps)}' in ended.out


def test_places_that_cannot_be_written(disk: Path, tmp_path: Path) -> None:
    document = tmp_path / "run.yaml"
    document.write_text(SMALL_DIGITS)
    ballast = fill(disk)
    ended = podscale(tmp_path, "train", str(document), "--set", f"run.workspace={disk}")
    assert ended.code == ExitCode.BAD_INPUT
    assert re.fullmatch(r"podscale: .* No space left on device.*", ended.err.strip())
    for command in ("run", "shard"):
        ended = podscale(tmp_path, command, str(document), "--set", f"run.workspace={disk}")
        assert ended.code == ExitCode.BAD_INPUT
        assert re.fullmatch(r"podscale: run\.workspace: .* free, about .* needed .*run\.workspace\.", ended.err.strip())
    ballast.unlink()
    make_read_only(disk)
    for command in ("run", "shard", "train"):
        ended = podscale(tmp_path, command, str(document), "--set", f"run.workspace={disk}")
        assert ended.code == ExitCode.BAD_INPUT
        assert re.fullmatch(
            r"podscale: .*(cannot be written|Read-only file system).* [Cc]hoose .*run\.workspace.*", ended.err.strip()
        )
    assert [path.name for path in disk.rglob("*") if path.is_file()] in ([], [".lease"])
