"""Cleanup of a launch's processes on Linux (/proc): they exit with their parent, and those that remain are killed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from podscale.util import env, processes

KILL_SECONDS = 10.0
"""Longest time for killing the processes of a launch, seconds."""


def exit_with_supervisor() -> None:
    """Make this process exit with its parent, or at once if the environment's supervisor is not among its ancestors."""
    processes.exit_with_parent()
    supervisor = env.read_number(env.SUPERVISOR)
    if supervisor is not None and supervisor not in ancestor_pids():
        processes.kill_self()


def ancestor_pids() -> Iterator[int]:
    """Yield the pids of the ancestors, the parent first."""
    pid = os.getppid()
    while pid > 0:
        yield pid
        pid = processes.parent_of(pid)


def launch_processes(rank_dir: Path, variable: str = env.RANK_DIR) -> list[int]:
    """Return the pids of running processes whose environment sets `variable` to `rank_dir`, whatever their parent."""
    assignment = f"{variable}={rank_dir}".encode()
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                environment = (entry / "environ").read_bytes()
            except OSError:
                continue  # it exited, or belongs to another user
            if assignment in environment.split(b"\0") and processes.is_alive(int(entry.name)):
                pids.append(int(entry.name))
    return pids


def kill_launch_processes(rank_dir: Path, variable: str = env.RANK_DIR) -> list[int]:
    """Kill the processes of a launch, repeatedly because they may start others, until none is left; return the pids."""
    killed: set[int] = set()
    deadline = time.monotonic() + KILL_SECONDS
    while (pids := launch_processes(rank_dir, variable)) and time.monotonic() < deadline:
        for pid in pids:
            killed.add(pid)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return sorted(killed)


def start_bound(
    arguments: list[str], variables: Mapping[str, str], *, stdin: int, stdout: int, stderr: int
) -> "subprocess.Popen[bytes]":
    """Start Python in its own session; it exits when this thread exits, so wait for it in the same thread."""
    return subprocess.Popen(
        [sys.executable, "-m", "podscale.launch.process_cleanup", sys.executable, *arguments],
        env=variables,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
    )


def main(command: list[str]) -> None:
    """Bind this process to its parent, then execute `command`."""
    exit_with_supervisor()
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
