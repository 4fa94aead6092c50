"""CPUs, memory, GPUs and TPUs of this machine, without a framework, whose import takes seconds."""

import os
import platform
import re
import shutil
import sysconfig
from dataclasses import dataclass
from pathlib import Path

GOOGLE_PCI_VENDOR = "0x1ae0"
TPU_PCI_DEVICES = {
    **{"0x0027": "v3", "0x005e": "v4", "0x0062": "v5p", "0x0063": "v5e"},  # v2 has the number of v3
    **{"0x006f": "v6e", "0x0076": "tpu7x"},
}
"""PCI vendor, and generation by PCI device. Source: jax 0.10.2, jax/_src/hardware_utils.py."""
TWO_DEVICE_CHIPS = frozenset({"v3", "tpu7x"})
"""TPU generations whose chips are two devices for JAX."""


@dataclass(frozen=True)
class MemoryInfo:
    """Bytes of main memory and of /dev/shm; 0 if unknown."""

    total: int
    available: int
    shared_free: int


def cpu_count() -> int:
    """Return the CPU cores of this process by its affinity and its container's quota, at least 1."""
    allowed = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return allowed
    return allowed if quota == "max" else max(1, min(allowed, int(quota) // int(period)))


def cpu_name() -> str:
    """Return the processor name from /proc/cpuinfo, else the architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def visible_gpu_names() -> list[str]:
    """Return the NVIDIA GPUs visible to a process as CUDA_VISIBLE_DEVICES names them: numbers, GPU or MIG UUIDs.

    Without the variable, the numbers of the device nodes.
    """
    nodes = len([node for node in Path("/dev").glob("nvidia[0-9]*") if node.name.removeprefix("nvidia").isdigit()])
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None or not nodes:
        return [str(number) for number in range(nodes)]
    names = [name.strip() for name in chosen.split(",") if name.strip()]
    if "-1" in names:  # CUDA ignores everything from the first invalid index on
        names = names[: names.index("-1")]
    parts_of_gpus = any(name.startswith("MIG-") for name in names)  # may outnumber the device nodes
    return names if parts_of_gpus else names[:nodes]


def visible_gpus() -> int:
    """Return the number of NVIDIA GPUs visible to a process: device nodes, or those in CUDA_VISIBLE_DEVICES."""
    return len(visible_gpu_names())


MINIMAL_DRIVERS = {"12": 525, "13": 580}
"""First driver branch of each CUDA major version, on Linux. It runs all minor versions (CUDA Compatibility guide)."""


def nvidia_driver(path: Path = Path("/proc/driver/nvidia/version")) -> str:
    """Return the version of NVIDIA's kernel driver, such as "580.65.06"; "" without one."""
    try:
        words = path.read_text(encoding="ascii", errors="replace").splitlines()[0].split()
    except (OSError, IndexError):
        return ""
    return next((word for word in words if re.fullmatch(r"\d+\.\d+(\.\d+)?", word)), "")


def driver_problem(cuda: str) -> str:
    """Return the reason if the driver is too old for software built for this CUDA version; "" if not, or unknown."""
    driver, needed = nvidia_driver(), MINIMAL_DRIVERS.get(cuda.partition(".")[0], 0)
    is_too_old = driver and int(driver.partition(".")[0]) < needed
    return f"driver {driver} is too old for CUDA {cuda}, which needs {needed} or newer" if is_too_old else ""


def c_compiler() -> str:
    """Return the C compiler that Triton uses: CC, else gcc or clang of the PATH; "" if there is none."""
    chosen = os.environ.get("CC")
    return shutil.which(chosen) or "" if chosen else shutil.which("gcc") or shutil.which("clang") or ""


PRECOMPILED_FOR_TRITON = "triton-cc"
"""Name of the compiler of the GPU image, which needs no headers (images/steps/triton.sh)."""


def missing_for_triton() -> list[str]:
    """Return what Triton lacks to compile a kernel's launcher: a C compiler, or Python's headers."""
    compiler = c_compiler()
    headers = Path(sysconfig.get_paths(scheme="posix_prefix")["include"], "Python.h")
    missing = [] if compiler else ["a C compiler"]
    if Path(compiler).name != PRECOMPILED_FOR_TRITON and not headers.exists():
        missing.append(str(headers))
    return missing


def gpu_names() -> list[str]:
    """Return the names of the machine's NVIDIA GPUs, hidden ones included, from the driver's files."""
    names = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        fields = dict(line.split(":", 1) for line in path.read_text(encoding="utf-8").splitlines() if ":" in line)
        names.append(fields.get("Model", "unknown").strip())
    return names or ["unknown NVIDIA GPU"] * visible_gpus()


def tpu_chips(bus: Path = Path("/sys/bus/pci/devices")) -> list[str]:
    """Return the generation of each TPU chip on the PCI bus."""
    devices = [
        vendor.with_name("device").read_text(encoding="ascii").strip()
        for vendor in sorted(bus.glob("*/vendor"))
        if vendor.read_text(encoding="ascii").strip() == GOOGLE_PCI_VENDOR
    ]
    return [TPU_PCI_DEVICES[device] for device in devices if device in TPU_PCI_DEVICES]  # not its network cards


def tpu_device_count() -> int:
    """Return the TPU devices of this machine as JAX counts them."""
    return sum(2 if chip in TWO_DEVICE_CHIPS else 1 for chip in tpu_chips())


def default_processes_per_node() -> int:
    """Return the default number of training processes per node: one per GPU, or one."""
    return visible_gpus() or 1


def memory_info() -> MemoryInfo:
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
    return MemoryInfo(values.get("MemTotal", 0), values.get("MemAvailable", 0), shared)


def oom_kill_count() -> int:
    """Return the number of OOM kills in this container so far (cgroup v2); 0 if unknown."""
    try:
        lines = Path("/sys/fs/cgroup/memory.events").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


def device_slug() -> str:
    """Return the name of this machine's first device for a file name."""
    names = gpu_names()
    name = names[0].removeprefix("NVIDIA ") if names else "cpu"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
