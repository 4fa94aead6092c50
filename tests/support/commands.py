"""The `podscale` command as real processes, which are found even if their parents have exited."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from podscale.distributed.worker_exit import registered_workers
from podscale.runs import programs_directory
from podscale.telemetry.events import filter_replays, read_records
from tests.support.tiny import TINY

MARK = "PODSCALE_TEST_MARK"
TIMEOUT_SECONDS = 270.0
"""Time limit for any event on a loaded machine, seconds."""

SMALL_DIGITS = (
    TINY
    + """
run: {id: small, workspace: ., seed: 1}
train: {epochs: 3, global_batch: 64, schedule: {learning_rate: 0.1, warmup_epochs: 1}}
evaluate: {crop_fraction: 1.0, every_epochs: 0}
checkpoint: {every_epochs: 0, every_steps: 5}
telemetry: {log_every: 1}
launch: {processes: 2, threads: 1, grace_seconds: 60, timeout_seconds: 120}
"""
)
"""67 steps of a tiny network on two processes, with a checkpoint every 5 steps, so that a kill loses some steps."""


@dataclass(frozen=True)
class Ended:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str

    @property
    def last(self) -> str:
        """The last line on standard error."""
        return self.err.rstrip().rpartition("\n")[2]


class Command:
    """One `podscale` command in `folder`; a variable in their environment marks all its descendants.

    Args:
        output: folder for its output; default: pipes, which are large enough for a run of minutes.
    """

    def __init__(
        self, folder: Path, *arguments: str, variables: Mapping[str, str] | None = None, output: Path | None = None
    ) -> None:
        self.started = time.time()
        self._printed = (output / "out", output / "err") if output is not None else None
        self.mark = f"{folder}-{time.monotonic_ns()}"
        to: Any = [subprocess.PIPE] * 2
        with ExitStack() as files:
            if self._printed is not None:
                to = [files.enter_context(path.open("wb")) for path in self._printed]
            self.process = subprocess.Popen(
                [sys.executable, "-m", "podscale", *arguments],
                cwd=folder,
                env={**os.environ, MARK: self.mark, **(variables or {})},
                stdin=subprocess.DEVNULL,
                stdout=to[0],
                stderr=to[1],
                text=True,
                errors="surrogateescape",
                start_new_session=True,
            )

    def end(self) -> Ended:
        """Wait for the exit, and check that no process that it started is left."""
        out, err = self.process.communicate(timeout=TIMEOUT_SECONDS)
        if self._printed is not None:
            out, err = (path.read_text(encoding="utf-8", errors="surrogateescape") for path in self._printed)
        deadline = time.monotonic() + 20
        while (left := self.members()) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not left, f"still running: {[cmdline(pid) for pid in left]}"
        return Ended(self.process.returncode, out, err)

    def kill(self) -> None:
        """Kill the command and all its descendants, at the end of a test."""
        for pid in [*self.members(), self.process.pid]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.communicate()

    def members(self) -> list[int]:
        """Return the running processes of this command, except itself."""
        mark = f"{MARK}={self.mark}".encode()
        return [pid for pid in pids() if pid != self.process.pid and mark in environment(pid) and alive(pid)]

    def ranks(self) -> dict[int, int]:
        """Return the process ids of the started ranks, by rank."""
        for pid in self.members():
            for entry in environment(pid):
                if entry.startswith(b"PODSCALE_RANK_DIR="):
                    return registered_workers(Path(os.fsdecode(entry.partition(b"=")[2])))
        return {}

    def stage(self) -> int:
        """Return the process id of the stage that supervises the ranks."""
        for pid in self.ranks().values():
            for entry in environment(pid):
                if entry.startswith(b"PODSCALE_SUPERVISOR="):
                    return int(entry.partition(b"=")[2])
        raise AssertionError("no ranks are running")

    def wait_for(self, condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not condition():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline, "timed out"
            time.sleep(0.01)

    def wait_for_steps(self, run: Path, number: int) -> None:
        """Wait until this command has logged that many steps in the run directory."""

        def done() -> bool:
            lines = [line["kind"] for line in read_records(run / "metrics.jsonl") if line["time"] > self.started]
            return lines.count("step") >= number

        self.wait_for(done)


def set_options(*changes: str) -> list[str]:
    """Return the `--set` options of these changes of the run document."""
    return [argument for change in changes for argument in ("--set", change)]


def podscale(folder: Path, *arguments: str, variables: Mapping[str, str] | None = None) -> Ended:
    """Run a command until it exits."""
    return Command(folder, *arguments, variables=variables).end()


def copy_workspace(calm: Path, target: Path) -> None:
    """Copy the finished run of the fixture `calm` and its data, but no run that another test has begun beside it."""
    for part in ("datasets", "runs/calm"):
        shutil.copytree(calm / part, target / part, symlinks=True)
    shutil.copy(calm / "run.yaml", target)


def result(run: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Return the final weights of a run and the loss of every step, for bitwise comparison."""
    losses = {
        line["step"]: line["loss"]
        for line in filter_replays(read_records(run / "metrics.jsonl"))
        if line["kind"] == "step"
    }
    assert list(losses) == list(range(1, len(losses) + 1))
    return {**load_file(run / "model" / "model.safetensors"), "losses": np.array(list(losses.values()))}


def programs(workspace: Path) -> dict[str, int]:
    """Return the JAX engine's cached programs in a workspace, with their modification times."""
    directory = programs_directory(str(workspace))
    return {path.name: path.stat().st_mtime_ns for path in directory.rglob("*-cache")}


def different(actual: dict[str, np.ndarray[Any, Any]], expected: dict[str, np.ndarray[Any, Any]]) -> list[str]:
    """Return the names of the arrays whose bits differ."""
    names = actual.keys() | expected.keys()
    return [n for n in sorted(names) if not np.array_equal(actual.get(n, np.empty(0)), expected.get(n, np.empty(0)))]


def pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def cmdline(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
    except OSError:
        return f"{pid} (gone)"


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
