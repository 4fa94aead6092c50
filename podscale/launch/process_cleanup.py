"""Nothing outlives its supervisor: processes die with their parent, and whoever is left is found and ended.

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
    """Binds this process to its parent, and so to the supervisor; dies at once where one in between is already gone.

    The supervisor's pid comes by environment, so that a parent which ended before the bond is noticed: then the
    supervisor is no longer among the ancestors.
    """
    processes.exit_with_parent()
    supervisor = env.read_number(env.SUPERVISOR)
    if supervisor is not None and supervisor not in ancestor_pids():
        processes.kill_self()


def ancestor_pids() -> Iterator[int]:
    """Pids from the parent upwards."""
    pid = os.getppid()
    while pid > 0:
        yield pid
        pid = parent_of(pid)


def parent_of(pid: int) -> int:
    """The parent's pid; 0 where the process is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def launch_processes(rank_dir: Path, variable: str = env.RANK_DIR) -> list[int]:
    """Living processes of a launch: those in whose environment `variable` names its rank directory, whoever their
    parent is now."""
    mark = f"{variable}={rank_dir}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                environment = (entry / "environ").read_bytes()
            except OSError:
                continue  # ended meanwhile, or another user's
            if mark in environment.split(b"\0") and processes.is_alive(int(entry.name)):
                found.append(int(entry.name))
    return found


def kill_launch_processes(rank_dir: Path, variable: str = env.RANK_DIR, timeout_seconds: float = 10.0) -> list[int]:
    """Kills these processes of a launch, again until none is left (they may be starting others); returns the pids."""
    ended: set[int] = set()
    deadline = time.monotonic() + timeout_seconds
    while (pids := launch_processes(rank_dir, variable)) and time.monotonic() < deadline:
        for pid in pids:
            ended.add(pid)
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.01)
    return sorted(ended)


def main(command: list[str]) -> None:
    """Becomes `command`, bound to the life of the parent: what the supervisor starts in place of the command."""
    exit_with_supervisor()
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
