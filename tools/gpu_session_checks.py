"""Checks before a session on a GPU, with the standard library alone: each thing that is missing, and its remedy.

    python tools/gpu_session_checks.py OUT PACKAGE...

Exits with 2 if nothing could run without it; the other notes cost some rows of the sweep. Used by gpu_session.sh, which
runs in any interpreter with torch.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

FREE_DISK_GIB = 20
"""Free disk for compiled kernels and results, GiB."""
FREE_FRACTION = 0.9
"""Fraction of a GPU's memory that should be free."""

SMI_TIMEOUT = 60
"""Timeout of nvidia-smi, seconds; with a broken driver it may hang."""

MINIMAL_DRIVERS = {"12": 525, "13": 580}
"""Oldest driver branch by CUDA's major version, as in `podscale.util.host_info`."""

DRIVER = Path("/proc/driver/nvidia/version")
"""File of the loaded kernel driver."""


class Problem(NamedTuple):
    """Thing that is missing; `fatal` if nothing runs without it."""

    name: str
    problem: str
    remedy: str
    fatal: bool = False

    def __str__(self) -> str:
        return f"{'MISSING' if self.fatal else 'note'}  {self.name}: {self.problem}. {self.remedy}"


def find_problems(out: Path, packages: Sequence[str]) -> list[Problem]:
    """Return everything that is missing for a session which writes to `out`."""
    return [*_python(packages), *_compiler(), *_gpu(), *_disk(out), *_optional()]


def installed_versions(packages: Sequence[str]) -> str:
    """Return the versions of Python, torch and the packages that are installed."""
    names = [name for name in ("torch", "torchvision", "triton", *packages) if _is_installed(name)]
    return ", ".join([f"Python {sys.version.split()[0]}", *(f"{name} {metadata.version(name)}" for name in names)])


def _python(packages: Sequence[str]) -> Iterator[Problem]:
    if sys.version_info < (3, 11):  # noqa: UP036  any interpreter may be named
        yield Problem("Python", f"{sys.version.split()[0]} is too old", "Set PYTHON to 3.11 or newer.", fatal=True)
    if missing := [name for name in ("torch", "torchvision") if not _is_installed(name)]:
        yield Problem(
            " and ".join(missing), f"not installed in {sys.executable}", "Set PYTHON to one that has them.", True
        )
    if missing := [name for name in packages if not _is_installed(name)]:
        remedy = "Set WHEELS to a folder of `tools/gpu_session.sh download`, or install them with pip."
        yield Problem("packages", f"not installed: {' '.join(missing)}", remedy, fatal=True)


def _is_installed(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _compiler() -> Iterator[Problem]:
    """Yield what Triton compiles its launchers with: without it, compiled and fused rows fail."""
    remedy = "Install gcc and python3-dev (Debian), or expect rows without compilation only."
    if not (shutil.which(os.environ.get("CC", "gcc")) or shutil.which("cc") or shutil.which("clang")):
        yield Problem("gcc", "no C compiler on the path", remedy)
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.exists():
        yield Problem("Python.h", f"not at {header}", remedy)


def _gpu() -> Iterator[Problem]:
    program = shutil.which("nvidia-smi")
    if program is None and DRIVER.exists():
        yield Problem("nvidia-smi", "not on the path", "GPU memory is not checked: see that no process holds it.")
        return
    if program is None:
        remedy = "Install the driver (580 or newer for CUDA 13), or give the container its GPU. REHEARSE=1 goes on."
        yield Problem("driver", "none is loaded, and nvidia-smi is not on the path", remedy, fatal=True)
        return
    query = ["--query-gpu=index,memory.free,memory.total,driver_version", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run([program, *query], capture_output=True, text=True, check=False, timeout=SMI_TIMEOUT)
    except subprocess.TimeoutExpired:
        problem = f"nvidia-smi does not exit within {SMI_TIMEOUT} s"
        yield Problem("driver", problem, "Reload the driver or restart the machine. REHEARSE=1 goes on.", fatal=True)
        return
    if done.returncode != 0 or not done.stdout.strip():
        message = (done.stdout + done.stderr).strip().splitlines() or ["it printed nothing"]
        yield Problem("driver", f"nvidia-smi fails: {message[0]}", "Load the driver. REHEARSE=1 goes on.", fatal=True)
        return
    rows = [line.split(", ") for line in done.stdout.strip().splitlines()]
    yield from _driver_version(rows[0][-1])
    for index, free, total, _ in rows:
        if free.isdigit() and total.isdigit() and int(free) < FREE_FRACTION * int(total):
            remedy = "End the processes that hold it (`nvidia-smi`), or expect rows out of memory."
            yield Problem("GPU memory", f"GPU {index} has {free} of {total} MiB free", remedy)


def _driver_version(driver: str) -> Iterator[Problem]:
    """Compare the version with CUDA's in torch."""
    cuda = _cuda_of_torch()
    needed = MINIMAL_DRIVERS.get(cuda.partition(".")[0], 0)
    branch = driver.partition(".")[0]
    if branch.isdigit() and int(branch) < needed:
        problem = f"{driver} is too old for the CUDA {cuda} of torch, which needs {needed} or newer"
        remedy = "Update it, or set PYTHON to a torch for an older CUDA. With CUDA's compatibility package, REHEARSE=1."
        yield Problem("driver", problem, remedy, fatal=True)


def _cuda_of_torch() -> str:
    """Return the CUDA version of the installed torch, such as 13.0, without importing it; "" if there is none."""
    try:
        path = metadata.distribution("torch").locate_file("torch/version.py")
        text = Path(str(path)).read_text(encoding="utf-8")
    except (metadata.PackageNotFoundError, OSError):
        return ""
    found = re.search(r"^cuda\b.*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return found[1] if found else ""


def _disk(out: Path) -> Iterator[Problem]:
    temporary = tempfile.gettempdir()
    for name, path in (("OUT", out), (temporary, Path(temporary))):
        free = shutil.disk_usage(path).free / 2**30
        if free < FREE_DISK_GIB:
            yield Problem(f"disk of {name}", f"{free:.1f} GiB free", f"Free {FREE_DISK_GIB} GiB for compiled kernels.")


def _optional() -> Iterator[Problem]:
    """Yield what only a part of the session needs."""
    if not _is_installed("jax"):
        yield Problem("jax", "not installed", "Install jax[cuda13], or expect no results of the JAX engine.")
    if not shutil.which("ncu"):
        remedy = "Install NVIDIA Nsight Compute, or expect bytes that are counted, not measured."
        yield Problem("ncu", "not on the path", remedy)


def main() -> int:
    """Print versions and what is missing; return 2 if nothing can run."""
    print(f"versions: {installed_versions(sys.argv[2:])}")
    problems = find_problems(Path(sys.argv[1]), sys.argv[2:])
    for problem in problems:
        print(problem)
    if not problems:
        print("the session has all that it needs")
    return 2 if any(problem.fatal for problem in problems) else 0


if __name__ == "__main__":
    sys.exit(main())
