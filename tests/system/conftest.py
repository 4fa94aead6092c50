"""Fixtures: an undisturbed run of the digits, to compare with or to copy, and a starter of supervisors."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from podscale.util.files import file_lock
from tests.support.commands import SMALL_DIGITS, podscale
from tests.support.supervised import Launch, launching


@pytest.fixture(scope="session")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Workspace with run.yaml, the digits' shard set, the finished run runs/calm and its files in tmp/.

    All processes of pytest share it and may add other runs. Copy it before you change these files.
    """
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    run_directory = folder / "digits"
    with file_lock(folder / "digits.lock"):
        if not (run_directory / "calm.err").exists():
            shutil.rmtree(run_directory, ignore_errors=True)  # left by an attempt that failed
            (run_directory / "tmp").mkdir(parents=True)
            (run_directory / "run.yaml").write_text(SMALL_DIGITS)
            variables = {"TMPDIR": str(run_directory / "tmp")}
            ended = podscale(run_directory, "run", "run.yaml", "--set", "run.id=calm", variables=variables)
            assert ended.code == 0, ended.err
            (run_directory / "calm.out").write_text(ended.out)
            (run_directory / "calm.err").write_text(ended.err)
    return run_directory


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Return launch(*options, **behaviour of ranks), which starts a supervisor with the run runs/t below tmp_path."""
    with launching(tmp_path) as start:
        yield start
