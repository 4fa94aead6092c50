"""Fixtures of the report tests."""

import shutil
from pathlib import Path

import pytest

from tests.support.digits_run import DigitsRun


@pytest.fixture
def run(digits_run: DigitsRun, tmp_path: Path) -> Path:
    """Copy of the run directory of the digits, which a test may change."""
    shutil.copytree(digits_run.path, tmp_path / "run")
    return tmp_path / "run"
