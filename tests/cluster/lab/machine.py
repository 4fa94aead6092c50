"""Requirements on the machine: Linux, root, and Debian packages."""

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from tests.cluster.lab.commands import attempt
from tests.cluster.lab.errors import Unavailable

# Required program or file -> the Debian package that provides it.
RUNNING = {
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "/usr/lib/cni/bridge": "containernetworking-plugins",
    "ip": "iproute2",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "openssl": "openssl",
}
BUILDING = {"podman": "podman", "buildah": "buildah", "runc": "runc", "debootstrap": "debootstrap"}


def require_root() -> None:
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        raise Unavailable("the cluster needs root on Linux: it makes network bridges, mounts and control groups")


def require(needed: dict[str, str], say: Callable[[str], None]) -> None:
    """Install missing packages (RUNNING or BUILDING). Raises Unavailable if that is not possible."""
    require_root()
    missing = sorted({package for name, package in needed.items() if not _present(name)})
    if not missing:
        return
    if shutil.which("apt-get") is None:
        raise Unavailable(f"this machine lacks {', '.join(missing)}, and has no apt-get to install them")
    say(f"installing {', '.join(missing)}")
    attempt("apt-get", "update", "-q")
    command = ["apt-get", "install", "-q", "-y", "--no-install-recommends", *missing]
    done = attempt(*command, DEBIAN_FRONTEND="noninteractive")
    if done.returncode:
        raise Unavailable(f"apt-get could not install {', '.join(missing)}:\n{done.stderr[-1500:]}")


def _present(name: str) -> bool:
    return Path(name).exists() if name.startswith("/") else shutil.which(name, path=_path()) is not None


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
