"""environment.json: with what a run was made, found without importing any of it."""

import os
import platform
import socket
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from podscale.files import write_json
from podscale.launch.jobspec import JobSpec
from podscale.launch.place import core_count, gpu_names
from podscale.version import VERSION

PACKAGES = (
    "torch",
    "torchvision",
    "nvidia-dali-cuda130",
    "numpy",
    "safetensors",
    "simplejpeg",
    "pillow",
    "kfp",
    "prometheus-client",
)


def write_environment(path: Path, spec: JobSpec) -> None:
    """Records versions, devices, command line and commit of this launch."""
    write_json(path, describe(spec))


def describe(spec: JobSpec) -> dict[str, Any]:
    return {
        "podscale": VERSION,
        "commit": _commit(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "cpu": _cpu_model(),
        "cores": core_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": gpu_names(),
        "nodes": spec.rendezvous.nodes,
        "processes": spec.processes,
        "threads": spec.threads,
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _commit() -> str | None:
    """The commit of the source this runs from, with a mark where files differ; an image gives it by environment."""
    given = os.environ.get("PODSCALE_COMMIT")
    source = Path(__file__).resolve().parents[2]
    if given or not (source / ".git").exists():
        return given
    try:
        described = subprocess.run(
            ["git", "-C", str(source), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=30,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return described.stdout.strip() or None
