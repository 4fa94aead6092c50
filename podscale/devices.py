"""What this machine offers, found without importing a framework (which takes seconds)."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Memory:
    """Bytes of main memory and of the shared memory file system; 0 where unknown."""

    total: int
    available: int
    shared_free: int


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def visible_gpus() -> int:
    """NVIDIA GPUs that a process started here would see: the device nodes, or fewer by CUDA_VISIBLE_DEVICES."""
    nodes = len([node for node in Path("/dev").glob("nvidia[0-9]*") if node.name.removeprefix("nvidia").isdigit()])
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None or not nodes:
        return nodes
    names = [name.strip() for name in chosen.split(",") if name.strip()]
    if "-1" in names:  # CUDA ignores everything from the first invalid index on
        names = names[: names.index("-1")]
    return min(nodes, len(names))


def default_processes() -> int:
    """Training processes of one node where the document leaves it open: one per GPU, or one."""
    return visible_gpus() or 1


def memory() -> Memory:
    """Main and shared memory now, in bytes."""
    values = {}
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            name, _, rest = line.partition(":")
            values[name] = int(rest.split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    try:
        shared = shutil.disk_usage("/dev/shm").free
    except OSError:
        shared = 0
    return Memory(values.get("MemTotal", 0), values.get("MemAvailable", 0), shared)
