"""What the tests of whole commands share: one undisturbed run of the digits, and supervisors of plain ranks."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.commands import SMALL_DIGITS, podscale
from tests.support.supervised import PROGRAMS, SUPERVISE, Launch, Run


@pytest.fixture(scope="session")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with run.yaml, the digits' shard set and the finished run runs/calm. Copy it before changing them;
    other runs may be made in it."""
    place = tmp_path_factory.mktemp("digits")
    (place / "run.yaml").write_text(SMALL_DIGITS)
    ended = podscale(place, "run", "run.yaml", "--set", "run.id=calm")
    assert ended.code == 0, ended.err
    (place / "calm.out").write_text(ended.out)
    (place / "calm.err").write_text(ended.err)
    return place


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Starts supervisors that work in <tmp_path>/runs/t; behaviour: what each rank does (PLAIN_RANK)."""
    runs: list[Run] = []

    def start(
        *options: str,
        module: str = "plain_rank",
        python_path: Path = PROGRAMS,
        variables: dict[str, str] | None = None,
        **behaviour: str,
    ) -> Run:
        place = tmp_path / "runs" / "t"
        place.mkdir(parents=True, exist_ok=True)
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PET_")},
            "PYTHONPATH": str(python_path),
            "PLAIN_RANK": json.dumps({name.strip("_").replace("all", "*"): value for name, value in behaviour.items()}),
            "PLAIN_PLACE": str(place),
            **(variables or {}),
        }
        settings = [f"run.workspace={tmp_path}", "run.id=t", "launch.processes=1", *options]
        process = subprocess.Popen(
            [sys.executable, "-c", SUPERVISE, module, *settings],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        runs.append(Run(process, place))
        return runs[-1]

    yield start
    for run in runs:
        run.process.kill()
        run.process.communicate()
        for pid in run.members():
            os.kill(pid, signal.SIGKILL)
