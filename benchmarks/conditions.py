"""Under which conditions a benchmark ran: the head of every file in benchmarks/results."""

import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).resolve().parents[1]


def machine() -> str:
    """Cores, processor model, memory, kernel, and how busy the machine is now."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return (
        f"{os.cpu_count()} cores of {models[0] if models else platform.machine()}, {memory:.0f} GiB, "
        f"Linux {platform.release()}; load average at the start {os.getloadavg()[0]:.1f}"
    )


def versions(packages: Sequence[str]) -> str:
    """Python's version and those of packages."""
    found = [f"Python {platform.python_version()}"]
    for name in packages:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{name} not installed")
    return ", ".join(found)


def head(title: str, packages: Sequence[str], command: str | None = None) -> list[str]:
    """Title, command, machine, versions and date; call it before anything is measured.

    command: how to repeat it; default: the script and arguments of this process.
    """
    script, *arguments = sys.argv
    shown = [Path(argument).name if "/" in argument else argument for argument in arguments]  # no paths of a machine
    command = command or f"python benchmarks/{Path(script).name} {shlex.join(shown)}".strip()
    return [
        f"# {title}",
        "",
        f"Command: `{command}`  ",
        f"Machine: {machine()}  ",
        f"Versions: {versions(packages)}  ",
        f"Date: {time.strftime('%Y-%m-%d')}",
        "",
    ]


def publish(path: Path, lines: Sequence[str]) -> None:
    """Writes the results file and prints it."""
    text = "\n".join([*lines, ""])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    print(text)


def code_version() -> tuple[str, str]:
    """(commit, git tree of podscale/) of the code beside this file; ends the program where podscale/ was changed."""
    changed = _git("status", "--porcelain", "--", "podscale")
    if changed:
        sys.exit(f"podscale/ has changes that no commit holds, so no record could name its code:\n{changed}")
    return _git("rev-parse", "HEAD"), _git("rev-parse", "HEAD:podscale")


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
