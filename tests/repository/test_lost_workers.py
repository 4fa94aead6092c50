"""`make test` fails and names the test if a worker of pytest-xdist is lost or stuck."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.conftest import ROOT

CONFTEST = """
import os
import pytest
pytest_plugins = ["tests.support.lost_workers"]
def pytest_configure():
    from tests.support import lost_workers
    lost_workers.GRACE = 1.0
"""
PASSING = """
import pytest
@pytest.mark.parametrize("number", range(3))
def test_passes(number): pass
"""
CRASHES = """
import os, time
def test_passes(): pass
def test_fatal():
    if os.fork() == 0:
        while not os.path.exists("over"):
            time.sleep(0.1)
        os._exit(0)
    os.abort()
"""
STUCK = """
from collections import deque
from itertools import repeat
import pytest
def test_passes(): pass
@pytest.mark.timeout(2)
def test_fatal(): deque(repeat(0), maxlen=0)
"""
LATE = """
@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session):
    if os.environ.get("PYTEST_XDIST_WORKER") == "gw0":
        os._exit(0)
"""


def run_suite(folder: Path, *, conftest: str = CONFTEST, fatal: str = PASSING) -> tuple[int, str]:
    """Return the exit code and the output of `make test` over six files in `folder`, one of which holds `fatal`."""
    (folder / "conftest.py").write_text(conftest)
    (folder / "pytest.ini").write_text("[pytest]\ntimeout = 60\n")
    for number in range(6):
        (folder / f"test_{number}.py").write_text(fatal if number == 4 else PASSING)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "MAKE", "MFLAGS"))}
    with (folder / "output").open("w") as output:  # a pipe would wait for the children of a lost worker as well
        process = subprocess.Popen(
            command_of_make_test(kept),
            cwd=folder,
            env=kept | {"PYTHONPATH": str(ROOT)},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        code = process.wait(120)
    finally:
        (folder / "over").touch()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return code, (folder / "output").read_text()


def command_of_make_test(environment: dict[str, str]) -> list[str]:
    """Return the command that `make test` runs, with this Python."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    printed = subprocess.run(
        ["make", "--no-print-directory", "-n", "-o", ".venv/.dev", "test", "WORKERS=2", "ARGS=-p no:cacheprovider"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return [sys.executable, *shlex.split(printed.stdout)[1:]]


@pytest.mark.parametrize("fatal", [CRASHES, STUCK], ids=["crashed", "stuck"])
def test_a_lost_worker_ends_the_run_and_the_test_is_named(tmp_path: Path, fatal: str) -> None:
    """The crashed test leaves a child behind; the other test is in native code, where no signal handler runs."""
    code, output = run_suite(tmp_path, fatal=fatal)
    assert code == 1, output
    assert "crashed while running 'test_4.py::test_fatal'" in output
    assert "the run ended early" in output
    assert "in test_fatal" in output, "the stack"


def test_a_worker_lost_after_its_last_test_fails_the_run(tmp_path: Path) -> None:
    code, output = run_suite(tmp_path, conftest=CONFTEST + LATE)
    assert code == 1, output
    assert "18 passed" in output
    assert "worker lost: gw0; the run ended early" in output


def test_a_run_that_keeps_its_workers_reports_no_early_end(tmp_path: Path) -> None:
    code, output = run_suite(tmp_path)
    assert code == 0, output
    assert "18 passed" in output
    assert "the run ended early" not in output
