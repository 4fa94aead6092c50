"""The chart's script that prepares the workspace, as user 65532 on real folders, and its Job in the release."""

import ast
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from podscale.config import loads
from podscale.runs.directory import RunDirectory, dataset_directory
from tests.support import helm

USER = 65532
SCRIPT = (helm.CHART / "files" / "prepare_workspace.py").read_text(encoding="utf-8")


def as_user(*command: str, **how: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, user=USER, group=USER, extra_groups=[USER], capture_output=True, text=True, cwd="/", **how
    )


def python() -> str:
    """Return a Python that another user may run. The script needs only the standard library."""
    for program in filter(None, (sys.executable, shutil.which("python3", path=os.defpath))):
        with suppress(PermissionError):
            if as_user(program, "-c", "").returncode == 0:
                return program
    pytest.skip("no Python here can be run by another user")


@pytest.fixture
def volume() -> Iterator[Path]:
    """Folder owned by root that other users can reach; pytest's temporary folders are private."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to run as another user")
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def prepared(volume: Path) -> subprocess.CompletedProcess[str]:
    return as_user(python(), "-c", SCRIPT, str(volume))


def test_a_volume_with_fsgroup_is_shared_with_the_group(volume: Path) -> None:
    os.chown(volume, 0, USER)
    volume.chmod(0o2775)
    for _ in range(2):  # an upgrade prepares again
        done = prepared(volume)
        assert done.returncode == 0, done.stderr
    for name in ("datasets", "runs"):
        stat_result = (volume / name).stat()
        assert (stat_result.st_uid, stat_result.st_gid, stat.S_IMODE(stat_result.st_mode)) == (USER, USER, 0o2775)
    assert f"{volume / 'runs'}: " in done.stdout


@pytest.mark.parametrize("folder", [".", "runs"])
def test_the_error_of_a_folder_owned_by_root_names_the_remedy(volume: Path, folder: str) -> None:
    if folder == "runs":
        volume.chmod(0o777)
    (volume / folder).mkdir(exist_ok=True)
    done = prepared(volume)
    assert done.returncode == 2, "a retry cannot help"
    where = volume / folder
    assert done.stderr.startswith(f"{where}: not writable for user {USER} (Permission denied): it belongs to 0:0")
    assert "chown -R 65532:65532" in done.stderr


def test_the_folders_are_those_that_runs_use() -> None:
    config = loads("run: {id: r, workspace: /w}", "test")
    used = {RunDirectory.for_config(config).path.parent.name, Path(dataset_directory("/w", config.data)).parent.name}
    folders = re.search(r"^FOLDERS = (.*)$", SCRIPT, re.MULTILINE)
    assert folders is not None
    assert set(ast.literal_eval(folders[1])) == used


def test_it_runs_on_the_claim_before_the_pipeline_is_uploaded() -> None:
    jobs = {item["metadata"]["name"]: item for item in helm.kinds(helm.template(None, helm.EVERYTHING), "Job")}
    prepare, upload = jobs["podscale-workspace-prepare"], jobs["podscale-upload"]
    hooks = [item["metadata"]["annotations"] for item in (prepare, upload)]
    assert hooks[0]["helm.sh/hook"] == hooks[1]["helm.sh/hook"]
    assert int(hooks[0]["helm.sh/hook-weight"]) < int(hooks[1].get("helm.sh/hook-weight", 0))
    pod = prepare["spec"]["template"]["spec"]
    assert pod["securityContext"]["fsGroup"] == USER
    assert pod["volumes"] == [{"name": "workspace", "persistentVolumeClaim": {"claimName": "podscale-workspace"}}]
    (container,) = pod["containers"]
    assert container["command"][:2] == ["python3", "-c"]
    assert (container["command"][2].rstrip(), container["command"][3]) == (SCRIPT.rstrip(), "/workspace")


def test_nothing_is_prepared_by_default() -> None:
    assert helm.kinds(helm.template(), "Job") == []
