"""Background processes, each recorded in a file with its process id and its start time, which detects a reused id."""

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

from tests.cluster.lab import places
from tests.cluster.lab.commands import environment


def log_of(name: str) -> Path:
    return places.STATE / "log" / f"{name}.log"


def start(name: str, *command: str | Path, cwd: Path | None = None) -> None:
    """Start the command in a new session, unless the process started under this name still runs."""
    if alive(name):
        return
    log_of(name).parent.mkdir(parents=True, exist_ok=True)
    _record(name).parent.mkdir(parents=True, exist_ok=True)
    with log_of(name).open("ab") as log:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment(),
            cwd=cwd,
            start_new_session=True,
        )
    _record(name).write_text(f"{child.pid} {_start_time(child.pid)}")


def recorded() -> list[str]:
    """Return the names of all processes that were started and not stopped, running or not."""
    return sorted(record.name for record in (places.STATE / "processes").glob("*"))


def alive(name: str) -> bool:
    return _pid(name) is not None


def stop(name: str, timeout_seconds: float = 10) -> None:
    """Stop the process started under this name with SIGTERM, and kill it after the timeout."""
    for sent in (signal.SIGTERM, signal.SIGKILL):
        if (pid := _pid(name)) is None:
            break
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, sent)
        deadline = time.monotonic() + timeout_seconds
        while alive(name) and time.monotonic() < deadline:
            time.sleep(0.05)
    _record(name).unlink(missing_ok=True)


def _record(name: str) -> Path:
    return places.STATE / "processes" / name


def _pid(name: str) -> int | None:
    try:
        pid, started = _record(name).read_text().split()
    except (FileNotFoundError, ValueError):
        return None
    return int(pid) if _start_time(int(pid)) == started else None


def _start_time(pid: int) -> str:
    """Return the start time of a running process, clock ticks since boot; empty for a zombie or a missing process."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state == "Z" else fields[18]
