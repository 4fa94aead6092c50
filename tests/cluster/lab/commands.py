"""Running other programs, with errors that say which one failed and what it said."""

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from tests.cluster.lab import places
from tests.cluster.lab.errors import LabError


def environment() -> dict[str, str]:
    """The environment of every program of the lab: its own programs first, its own cluster."""
    path = f"{places.bin_dir()}:{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    return os.environ | {"PATH": path, "KUBECONFIG": str(places.KUBECONFIG)}


def run(*command: str | Path, stdin: str | None = None, cwd: Path | None = None, **env: str) -> str:
    """Standard output of a command that has to succeed; LabError with the end of what it said if it does not."""
    done = attempt(*command, stdin=stdin, cwd=cwd, **env)
    if done.returncode:
        raise LabError(f"{' '.join(map(str, command[:6]))} ... ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return done.stdout


def attempt(
    *command: str | Path, stdin: str | None = None, cwd: Path | None = None, **env: str
) -> subprocess.CompletedProcess[str]:
    """The same, where failing is an answer too."""
    try:
        return subprocess.run(
            command, input=stdin, cwd=cwd, env=environment() | env, text=True, capture_output=True, check=False
        )
    except FileNotFoundError as error:
        raise LabError(f"{command[0]} is not installed here") from error


def kubectl(*arguments: str | Path, stdin: str | None = None) -> str:
    return run("kubectl", *arguments, stdin=stdin)


def wait_for(what: str, seconds: float, ready: Callable[[], bool], log: Path | None = None) -> None:
    """Returns when `ready` does; LabError after that many seconds, naming the log that should tell why."""
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline:
            hint = f"; see {log}" if log else ""
            raise LabError(f"waited {seconds:.0f} s in vain for {what}{hint}")
        time.sleep(0.2)
