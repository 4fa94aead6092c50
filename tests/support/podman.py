"""Settings with which podman works inside small virtual machines too. `python3 -m tests.support.podman` prints them."""

import resource
import shutil
from pathlib import Path

PROCESSES = 32768
"""podman lowers its own limit to this, and may give no container more."""


def settings() -> str:
    """Limits that this process may give away, and runc: it takes every layout of control groups, crun no hybrid one."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    limit = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    processes = PROCESSES if limit == resource.RLIM_INFINITY else min(PROCESSES, limit)
    lines = ["[containers]", f'default_ulimits = ["nofile={files}:{files}", "nproc={processes}:{processes}"]']
    if shutil.which("runc"):
        lines += ["[engine]", 'runtime = "runc"']
    return "\n".join(lines) + "\n"


def write(folder: Path) -> Path:
    """A file with these settings in the folder, for CONTAINERS_CONF to name."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "containers.conf"
    path.write_text(settings())
    return path


if __name__ == "__main__":
    print(settings(), end="")
