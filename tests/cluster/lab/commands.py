"""Execution of programs, with errors that name the program and its output."""

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from tests.cluster.lab import places
from tests.cluster.lab.errors import LabError


def environment() -> dict[str, str]:
    """Return the environment of the lab's programs: the lab's own programs first on the PATH, and its cluster."""
    path = f"{places.bin_dir()}:{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    return os.environ | {"PATH": path, "KUBECONFIG": str(places.KUBECONFIG)}


def run(*command: str | Path, stdin: str | None = None, cwd: Path | None = None, **env: str) -> str:
    """Run a command and return its standard output. Raises LabError with the end of its output if it fails."""
    done = attempt(*command, stdin=stdin, cwd=cwd, **env)
    if done.returncode:
        raise LabError(f"{' '.join(map(str, command[:6]))} ... failed with {done.returncode}:\n{done.stderr[-3000:]}")
    return done.stdout


def attempt(
    *command: str | Path, stdin: str | None = None, cwd: Path | None = None, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run a command that may fail, and return the process."""
    try:
        return subprocess.run(
            command, input=stdin, cwd=cwd, env=environment() | env, text=True, capture_output=True, check=False
        )
    except FileNotFoundError as error:
        raise LabError(f"{command[0]} is not installed") from error


def kubectl(*arguments: str | Path, stdin: str | None = None) -> str:
    return run("kubectl", *arguments, stdin=stdin)


def wait_for(what: str, seconds: float, ready: Callable[[], bool], log: Path | None = None) -> None:
    """Wait until `ready`. Raises LabError after that many seconds, with the log that may show the reason."""
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline:
            hint = f"; see {log}" if log else ""
            raise LabError(f"{what}: not within {seconds:.0f} s{hint}")
        time.sleep(0.2)
