"""Under which conditions a benchmark ran: the head of every file in benchmarks/results."""

import importlib.metadata
import os
import platform
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


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
