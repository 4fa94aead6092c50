"""environment.json: versions, devices, command line and commit of a run, read without importing the packages."""

import os
import platform
import socket
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from podscale.launch.worker_spec import WorkerSpec
from podscale.util import env, host_info
from podscale.version import VERSION, installed

RECORDED_PACKAGES = (
    "torch",
    "torchvision",
    "jax",
    "jaxlib",
    "libtpu",
    "nvidia-dali-cuda130",
    "numpy",
    "safetensors",
    "simplejpeg",
    "pillow",
    "kfp",
    "prometheus-client",
)


def describe_environment(spec: WorkerSpec) -> dict[str, Any]:
    """Return the contents of environment.json: versions, devices, command line and commit of this launch."""
    return {
        "podscale": VERSION,
        "commit": _source_commit(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": os.environ.get(env.COMMAND),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: version for name in RECORDED_PACKAGES if (version := installed(name))},
        "cpu": host_info.cpu_name(),
        "cores": host_info.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": host_info.gpu_names(),
        "nodes": spec.rendezvous.nodes,
        "processes": spec.processes_per_node,
        "threads": spec.threads_per_process,
    }


def _source_commit() -> str | None:
    """Return the commit of the source tree, marked if files differ; an image sets it in the environment."""
    image_commit = os.environ.get(env.COMMIT)
    source = Path(__file__).resolve().parents[2]
    if image_commit or not (source / ".git").exists():
        return image_commit
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
