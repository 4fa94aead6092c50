"""tools/ci_cluster.sh: commands and their order, failures, and tests that are not run."""

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "ci_cluster.sh"
CANNOT, TIMED_OUT = 69, 124

# Stand-in for the interpreter: writes its arguments, and exits as set for the first argument list with that word.
PYTHON = """#!/bin/bash
echo "$*" >> calls
[[ "$*" == *status ]] && echo "{processes}  kube-apiserver"
[[ -n "{word}" && "$*" == *"{word}"* ]] && exit {status}
exit 0
"""


class Script:
    """Script in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "tools").mkdir()
        shutil.copy(SCRIPT, folder / "tools")
        (folder / ".venv" / "bin").mkdir(parents=True)
        self.processes = "ended  "
        """State of the cluster's processes, as the lab prints it."""

    def run(self, word: str = "", status: int = 0, minutes_left: float = 55) -> tuple[int, str, list[str]]:
        """Return the exit status, the output, and the last argument or two of every call."""
        python = self.folder / ".venv" / "bin" / "python"
        python.write_text(PYTHON.format(word=word, status=status, processes=self.processes))
        python.chmod(0o755)
        started = int(time.time() - (55 - minutes_left) * 60)
        done = subprocess.run(
            ["bash", str(self.folder / "tools" / SCRIPT.name)],
            env={**os.environ, "CI_STARTED": str(started), "CI_SECONDS": "3300"},
            capture_output=True,
            text=True,
            timeout=60,
        )
        calls = self.folder / "calls"
        made = calls.read_text().splitlines() if calls.exists() else []
        short = [call.removeprefix("-m ").replace("pytest -p no:cacheprovider --durations=10 ", "") for call in made]
        return done.returncode, done.stdout + done.stderr, [call.replace("tests.cluster.lab ", "") for call in short]


@pytest.fixture
def script(tmp_path: Path) -> Script:
    return Script(tmp_path)


def test_everything_runs_in_order_and_the_cluster_is_stopped(script: Script) -> None:
    status, output, calls = script.run()
    assert (status, output) == (0, "")
    tests = ["tests/cluster -m cluster_ci", "tests/images -k not two_builds"]
    assert calls == ["build", "tests/chart", "status", "up", "images base tools", *tests, "down"]


def test_a_cluster_that_runs_already_is_not_stopped(script: Script) -> None:
    script.processes = "running"
    assert "down" not in script.run()[2]


@pytest.mark.parametrize("minutes", [-3, 0, 20])
def test_without_enough_time_nothing_starts(script: Script, minutes: float) -> None:
    status, output, calls = script.run(minutes_left=minutes)
    assert (status, calls) == (0, [])
    for part in ("NOT RUN", "27 minutes"):
        assert part in output


@pytest.mark.parametrize(("status", "reason"), [(TIMED_OUT, "too slow"), (CANNOT, "this machine")])
def test_a_machine_too_slow_or_too_small_to_compile_is_no_failure(script: Script, status: int, reason: str) -> None:
    ended, output, calls = script.run("lab build", status)
    assert (ended, calls) == (0, ["build"])
    assert f"NOT RUN: {reason}" in output


STEPS = ["lab up", "lab images", "tests/chart", "tests/cluster -m", "tests/images"]


@pytest.mark.parametrize("step", STEPS)
def test_any_other_failed_step_is_a_failure(script: Script, step: str) -> None:
    ended, output, calls = script.run(step, 1)
    assert ended == 1
    assert "NOT RUN" not in output
    assert step == "tests/chart" or calls[-1] == "down"


@pytest.mark.parametrize("step", STEPS)
def test_a_step_that_takes_too_long_is_reported_as_not_run(script: Script, step: str) -> None:
    """Simulate a slow machine. A test that hangs fails at its own time limit."""
    ended, output, calls = script.run(step, TIMED_OUT)
    assert ended == 0
    assert "NOT RUN: too slow" in output
    assert step == "tests/chart" or calls[-1] == "down"


def test_a_compiler_that_fails_is_a_failure(script: Script) -> None:
    assert script.run("lab build", 1)[0] == 1
