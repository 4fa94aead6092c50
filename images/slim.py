#!/usr/bin/env python3
"""Remove files of installed packages that no process of an image reads, and print their size.

usage: slim.py SITE_PACKAGES

- files and folders of UNREAD, for compilers, profilers and other devices;
- tests, static libraries, type stubs, and extension modules for other versions of Python;
- the symbol tables for debuggers of shared libraries (see elf.py): half of the size of some.

Libraries that others are linked to stay: tests/images/test_libraries.py checks every library of an image.
"""

import re
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import elf

UNREAD = (
    # Headers and tools for building extensions. CUDA's own headers stay: PyTorch may hand them to NVRTC.
    "torch/include",
    "torch/share/cmake",
    "torch/bin/protoc*",
    "nvidia/dali/include",
    "nvidia/libnvcomp/bin",
    # Triton's profiler, with its own CUPTI for each architecture; torch.profiler uses the one in nvidia/cu13/lib.
    "triton/_C/libproton.so",
    "triton/backends/nvidia/lib/cupti*",
    # Triton's code generator for AMD GPUs, loaded when a kernel is compiled for one, and its developers' test tools.
    "triton/backends/amd/lib/libtriton_amd_codegen.so",
    "triton/FileCheck",
    "triton/instrumentation",
    "triton/plugins",
    # cuSOLVER over several GPUs: neither PyTorch nor DALI links or loads it.
    "nvidia/cu13/lib/libcusolverMg.so*",
    # NVSHMEM inside Triton kernels; libtorch_nvshmem.so links the host's library, which stays.
    "nvidia/nvshmem/lib/*.bc",
)
"""Patterns below site-packages; missing files are no error."""
FOLDERS = ("test", "tests")
FILES = ("*.a", "*.pxd", "*.pyi")
OTHER_PYTHON = re.compile(r"\.cpython-\d+t?-")
MIN_GAIN = 500_000
"""Bytes that cutting must remove; small libraries stay as published."""


def main(site: Path) -> int:
    """Slim a site-packages folder in place; return the exit status."""
    if not site.is_dir():
        print(f"{site}: no such folder. Install the packages first.", file=sys.stderr)
        return 2
    removed = sum(_remove(path) for path in sorted(unread(site)))
    libraries = [path for path in sorted(site.rglob("*.so*")) if _is_file(path) and path.stat().st_size > MIN_GAIN]
    cut = sum(elf.shrink(path, at_least=MIN_GAIN) for path in libraries)
    print(f"removed {removed / 1e6:.0f} MB of unread files and {cut / 1e6:.0f} MB of symbol tables")
    return 0


def unread(site: Path) -> Iterator[Path]:
    """Yield the files and folders to remove; a folder and files inside of it may both occur."""
    for pattern in UNREAD:
        yield from site.glob(pattern)
    for name in FOLDERS:
        yield from (path for path in site.rglob(name) if path.is_dir())
    for pattern in FILES:
        yield from filter(_is_file, site.rglob(pattern))
    suffix = str(sysconfig.get_config_var("EXT_SUFFIX"))
    yield from (
        path for path in site.rglob("*.so") if OTHER_PYTHON.search(path.name) and not path.name.endswith(suffix)
    )


def _remove(path: Path) -> int:
    """Remove a file or folder, unless it was removed with another; return its bytes."""
    if not path.exists() and not path.is_symlink():
        return 0
    files = path.rglob("*") if path.is_dir() and not path.is_symlink() else (path,)
    size = sum(file.lstat().st_size for file in files if not file.is_dir())
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
    return size


def _is_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1])))
