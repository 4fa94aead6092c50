"""Settings for podman in small virtual machines; `python3 -m tests.support.podman` prints them."""

import resource
import shutil
from pathlib import Path

PROCESSES = 32768
"""Resource limit to which podman lowers its own; containers cannot have more."""


def settings() -> str:
    """Return settings with limits of this process and runc, because crun does not support hybrid control groups."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    limit = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    processes = PROCESSES if limit == resource.RLIM_INFINITY else min(PROCESSES, limit)
    lines = ["[containers]", f'default_ulimits = ["nofile={files}:{files}", "nproc={processes}:{processes}"]']
    if shutil.which("runc"):
        lines += ["[engine]", 'runtime = "runc"']
    return "\n".join(lines) + "\n"


def write(folder: Path) -> Path:
    """Write the settings to a file in the folder, for CONTAINERS_CONF, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "containers.conf"
    path.write_text(settings())
    return path


if __name__ == "__main__":
    print(settings(), end="")
