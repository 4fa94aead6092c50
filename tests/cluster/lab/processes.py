"""Background processes that are known by a file: their process id, and the start time that tells a reused id apart."""

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
    """Runs the command in a session of its own, unless the one that was started under this name is still alive."""
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
    """The names of all processes that were started and not stopped, whether they are alive or not."""
    return sorted(record.name for record in (places.STATE / "processes").glob("*"))


def alive(name: str) -> bool:
    return _pid(name) is not None


def stop(name: str, patience: float = 10) -> None:
    """Ends the process started under this name: asked first, killed after `patience` seconds."""
    for sent in (signal.SIGTERM, signal.SIGKILL):
        if (pid := _pid(name)) is None:
            break
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, sent)
        deadline = time.monotonic() + patience
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
    """Of a process that is there and no zombie, in clock ticks since boot; otherwise empty, which no record holds."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state == "Z" else fields[18]
