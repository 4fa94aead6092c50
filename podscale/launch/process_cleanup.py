"""Cleanup of a launch's processes: they exit with their parent, and remaining ones are found and killed.

Linux only: it reads /proc.
"""

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from podscale.util import env, processes


def exit_with_supervisor() -> None:
    """Make this process exit when its parent exits, and at once if its supervisor is already gone.

    The supervisor's pid is in the environment. If a parent exited before this call, the supervisor is no longer among
    the ancestors.
    """
    processes.exit_with_parent()
    supervisor = env.read_number(env.SUPERVISOR)
    if supervisor is not None and supervisor not in ancestor_pids():
        processes.kill_self()


def ancestor_pids() -> Iterator[int]:
    """Yield the pids of the ancestors, the parent first."""
    pid = os.getppid()
    while pid > 0:
        yield pid
        pid = parent_of(pid)


def parent_of(pid: int) -> int:
    """Return the parent's pid; 0 if the process is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def launch_processes(rank_dir: Path, variable: str = env.RANK_DIR) -> list[int]:
    """Return the pids of a launch's running processes, whatever their parent is now.

    Args:
        rank_dir: Rank directory of the launch.
        variable: Environment variable that holds it in the processes of the launch.
    """
    mark = f"{variable}={rank_dir}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                environment = (entry / "environ").read_bytes()
            except OSError:
                continue  # it exited, or belongs to another user
            if mark in environment.split(b"\0") and processes.is_alive(int(entry.name)):
                found.append(int(entry.name))
    return found


def kill_launch_processes(rank_dir: Path, variable: str = env.RANK_DIR, timeout_seconds: float = 10.0) -> list[int]:
    """Kill the processes of a launch until none is left, because they may start others; return their pids."""
    killed: set[int] = set()
    deadline = time.monotonic() + timeout_seconds
    while (pids := launch_processes(rank_dir, variable)) and time.monotonic() < deadline:
        for pid in pids:
            killed.add(pid)
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.01)
    return sorted(killed)


def main(command: list[str]) -> None:
    """Bind this process to its parent, then execute `command`; the supervisor starts its children through this."""
    exit_with_supervisor()
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
