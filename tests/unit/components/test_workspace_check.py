"""The workspace of a pod must be on a mounted volume that its user can write."""

import os
from pathlib import Path

import pytest

from podscale.components.workspace_check import MOUNT_TABLE, check_workspace_mounted
from tests.support.refusals import refused

LINE = "{number} 1 0:{number} / {path} rw,relatime - ext4 /dev/sda rw\n"


def table(folder: Path, *paths: Path | str) -> Path:
    """Return a file in the form of /proc/self/mountinfo."""
    file = folder / "mountinfo"
    lines = [LINE.format(number=number, path=str(path).replace(" ", "\\040")) for number, path in enumerate(paths)]
    file.write_text("".join(lines))
    return file


def test_a_folder_of_the_container_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with refused("launch.cluster.workspace_claim", field="run.workspace", got="/workspace"):
        check_workspace_mounted("/workspace", table(tmp_path, "/", "/proc", "/dev/shm", "/workspace2"))


@pytest.mark.parametrize("name", ["volume", "a volume"])
def test_a_workspace_on_a_volume(tmp_path: Path, name: str) -> None:
    volume = tmp_path / name
    volume.mkdir()
    mounts = table(tmp_path, "/", volume)
    check_workspace_mounted(str(volume), mounts)
    check_workspace_mounted(f"file://{volume}/team/a", mounts)


@pytest.mark.skipif(os.getuid() == 0, reason="root writes everywhere")
def test_a_volume_that_cannot_be_written(tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    volume.mkdir(mode=0o555)
    with refused("workspace.prepare", field="run.workspace"):
        check_workspace_mounted(str(volume), table(tmp_path, "/", volume))


def test_root_of_the_volume_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    volume = tmp_path / "volume"
    (volume / "runs").mkdir(parents=True)
    mounts = table(tmp_path, "/", volume)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name == "runs")
    check_workspace_mounted(str(volume), mounts)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with refused("workspace.prepare", field="run.workspace"):
        check_workspace_mounted(str(volume), mounts)


def test_the_table_of_this_machine_has_its_root(tmp_path: Path) -> None:
    assert MOUNT_TABLE.read_text().splitlines()
    check_workspace_mounted("/dev/shm")
    check_workspace_mounted(str(tmp_path), tmp_path / "no table")
