"""What this machine or container offers to a launch, found without importing a framework."""

import os
import subprocess
from pathlib import Path


def gpu_count() -> int:
    """GPUs this process may use: CUDA_VISIBLE_DEVICES where set, else the driver's list, else its device files."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() and name.strip() != "-1"])
    devices = [path for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdigit()]
    if not devices:
        return 0
    return len(gpu_names()) or len(devices)


def gpu_names() -> list[str]:
    """Names of the GPUs by nvidia-smi; empty where it is not there or does not answer."""
    try:
        listing = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return listing.stdout.splitlines() if listing.returncode == 0 else []


def core_count() -> int:
    """CPU cores this process may use: its affinity and its container's quota, at least 1."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def memory_kills() -> int:
    """Processes of this container that the kernel has killed for memory so far (cgroup v2); 0 where unknown."""
    try:
        lines = Path("/sys/fs/cgroup/memory.events").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
