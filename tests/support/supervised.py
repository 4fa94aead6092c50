"""Supervisor in a separate process, with ranks whose behaviour the test sets."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.support.forked_commands import ForkedProcess, ForkServer

PROGRAMS = Path(__file__).parents[1] / "system" / "programs"
SUPERVISE = """
import functools, sys
from podscale.stages import local
from podscale.config import load
from podscale.errors import PodscaleError
from podscale.launch import supervisor

supervisor.supervise_stage = functools.partial(supervisor.supervise_stage, worker_module=sys.argv[1])
try:
    local.train(load(None, sys.argv[2:]), "memory://nowhere")
except PodscaleError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(int(error.exit_code))
"""


@dataclass
class Run:
    """Supervisor process and its run directory."""

    process: ForkedProcess
    run_directory: Path

    def end(self, seconds: float = 180) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=seconds)
        return self.process.returncode, out, err

    def outcome(self) -> dict[str, object]:
        entry: dict[str, object] = json.loads((self.run_directory / "outcome.json").read_text())["train"]
        return entry

    def wait_for(self, condition: Callable[[], bool], seconds: float = 180) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def wait_for_ranks(self, count: int) -> None:
        self.wait_for(lambda: len(list(self.run_directory.glob("ready-*"))) == count)

    def members(self) -> list[int]:
        """Return all descendants of the supervisor, found by their environment."""
        pids = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    environment = (entry / "environ").read_bytes()
                    state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                except OSError:
                    continue
                if f"PLAIN_DIRECTORY={self.run_directory}".encode() in environment and state not in "ZX":
                    pids.append(int(entry.name))
        return pids


Launch = Callable[..., Run]


@cache
def server() -> ForkServer:
    """Return a process that has imported what a supervisor needs, most of its CPU time."""
    return ForkServer("podscale.stages.local", "podscale.launch.supervisor")


@contextmanager
def launching(tmp_path: Path) -> Iterator[Launch]:
    """Yield a function that starts supervisors in a folder; their descendants are killed at the end."""
    runs: list[Run] = []

    def start(
        *options: str,
        module: str = "plain_rank",
        python_path: Path = PROGRAMS,
        variables: dict[str, str] | None = None,
        **behaviour: str,
    ) -> Run:
        run_directory = tmp_path / "runs" / "t"
        run_directory.mkdir(parents=True, exist_ok=True)
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PET_")},
            "PYTHONPATH": str(python_path),
            "PLAIN_RANK": json.dumps({name.strip("_").replace("all", "*"): value for name, value in behaviour.items()}),
            "PLAIN_DIRECTORY": str(run_directory),
            **(variables or {}),
        }
        small = ["model.name=resnet18", "input.image_size=32"]  # the memory of the default network may not be free
        settings = [f"run.workspace={tmp_path}", "run.id=t", "launch.processes=1", *small, *options]
        runs.append(Run(server().start(SUPERVISE, [module, *settings], environment), run_directory))
        return runs[-1]

    yield start
    for run in runs:
        run.process.kill()
        run.process.communicate()
        for pid in run.members():
            os.kill(pid, signal.SIGKILL)
