""".ci/run: the order of its suites, and what decides: failures, and `make test` at the deadline."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / ".ci" / "run"
SUITES = ["lint", "types", "test", "test-slow", "test-gpu-paper", "test-examples", "test-drills"]
# Each suite writes its name; those of FAILS exit with 1, those of HANGS wait.
MAKEFILE = """
lint types test test-slow test-gpu-paper test-examples test-drills:
	@echo $@ >> suites
	@case " $(HANGS) " in *" $@ "*) sleep 90;; esac
	@case " $(FAILS) " in *" $@ "*) exit 1;; esac
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / ".ci").mkdir()
    shutil.copy(SCRIPT, tmp_path / ".ci")
    (tmp_path / "Makefile").write_text(MAKEFILE)
    (tmp_path / "tools").mkdir()
    for name in ("test_programs.sh", "ci_cluster.sh"):
        program = tmp_path / "tools" / name
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
    return tmp_path


def run(folder: Path, seconds: int = 3000, **variables: str) -> tuple[int, list[str]]:
    """Return the exit status and the suites that were started."""
    environment = {**os.environ, "CI_SECONDS": str(seconds), **variables}
    environment.pop("MAKEFLAGS", None)
    command = ["bash", str(folder / ".ci" / "run")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    return done.returncode, (folder / "suites").read_text().split()


def test_all_suites_run_in_order(folder: Path) -> None:
    assert run(folder) == (0, SUITES)


@pytest.mark.parametrize("suite", SUITES[:-1])
def test_a_failure_ends_the_run(folder: Path, suite: str) -> None:
    status, suites = run(folder, FAILS=suite)
    assert status != 0
    assert suites[-1] == suite


def test_the_drills_do_not_decide(folder: Path) -> None:
    assert run(folder, FAILS="test-drills") == (0, SUITES)


@pytest.mark.parametrize(
    ("suite", "seconds", "fails"), [("test", 2, True), pytest.param("test-slow", 62, False, marks=pytest.mark.slow)]
)
def test_only_make_test_must_end_in_time(folder: Path, suite: str, seconds: int, fails: bool) -> None:
    """The others start if a minute is left."""
    status, suites = run(folder, seconds, HANGS=suite)
    assert (status != 0) is fails
    assert suites[-1] == suite
