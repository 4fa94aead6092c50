"""Head of every page in benchmarks/results: command, machine, versions."""

import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import ROOT

THREADS = ("OMP_NUM_THREADS", "NPROC", "JAX_PLATFORMS")
"""Environment variables that change the results; those that are set are part of the command."""


def machine() -> str:
    """Return cores, processor model, memory, kernel, and the present load of the machine."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return (
        f"{os.cpu_count()} cores of {models[0] if models else platform.machine()}, {memory:.0f} GiB, "
        f"Linux {platform.release()}; load average at the start {os.getloadavg()[0]:.1f}"
    )


def versions(packages: Sequence[str]) -> str:
    """Return the versions of Python and of each package."""
    texts = [f"Python {platform.python_version()}"]
    for name in packages:
        try:
            texts.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            texts.append(f"{name} not installed")
    return ", ".join(texts)


def command_line() -> str:
    """Return the command of this process, without paths of the machine."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    module = spec.name.removesuffix(".__main__") if spec else f"benchmarks.{Path(sys.argv[0]).stem}"
    variables = [f"{name}={os.environ[name]}" for name in THREADS if name in os.environ]
    return shlex.join([*variables, "python", "-m", module, *map(without_folders, sys.argv[1:])])


def without_folders(argument: str) -> str:
    """Return an argument, or the value of `key=value`, without the folders of its path."""
    key, equals, value = argument.rpartition("=")
    return f"{key}{equals}{Path(value).name if '/' in value else value}"


def head(title: str, packages: Sequence[str], command: str | None = None) -> list[str]:
    """Return title, command (default: of this process), machine, versions and date. Call it before measuring."""
    return [
        f"# {title}",
        "",
        f"Command: `{command or command_line()}`  ",
        f"Machine: {machine()}  ",
        f"Versions: {versions(packages)}  ",
        f"Date: {time.strftime('%Y-%m-%d')}",
        "",
    ]


def code_version() -> str:
    """Return the git tree of podscale/; exit if podscale/ has uncommitted changes."""
    if changed := _git("status", "--porcelain", "--", "podscale"):
        sys.exit(f"podscale/ has uncommitted changes, so results cannot name their code:\n{changed}")
    return _git("rev-parse", "HEAD:podscale")


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
