#!/usr/bin/env python3
"""Takes out of installed packages what no process of an image reads, and tells how much that was.

usage: slim.py SITE_PACKAGES

- files and folders of UNREAD: what compilers, profilers and other devices need;
- tests, static libraries, type stubs, and extension modules for other versions of Python;
- the symbol tables for debuggers of shared libraries (see elf.py): half of the size of some.

Nothing that another file is linked to goes: tests/images/test_linked_libraries.py looks at every library of an image.
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
    # Triton's profiler, with a CUPTI of its own for each architecture; torch.profiler has nvidia/cu13/lib's.
    "triton/_C/libproton.so",
    "triton/backends/nvidia/lib/cupti*",
    # Triton's code generator for AMD, loaded when a kernel is compiled for one, and what its developers test with.
    "triton/backends/amd/lib/libtriton_amd_codegen.so",
    "triton/FileCheck",
    "triton/instrumentation",
    "triton/plugins",
    # cuSOLVER over several GPUs: neither PyTorch nor DALI is linked to it or names it.
    "nvidia/cu13/lib/libcusolverMg.so*",
    # NVSHMEM inside of Triton kernels; libtorch_nvshmem.so is linked to the host's library, which stays.
    "nvidia/nvshmem/lib/*.bc",
)
"""Patterns below site-packages; a package that is not there, or no longer has them, is no error."""
FOLDERS = ("test", "tests")
FILES = ("*.a", "*.pxd", "*.pyi")
OTHER_PYTHON = re.compile(r"\.cpython-\d+t?-")
SYMBOLS_WORTH = 500_000
"""Bytes that cutting must gain: small libraries stay as they were published."""


def main(site: Path) -> int:
    """Slims a site-packages folder in place; 2 where there is none."""
    if not site.is_dir():
        print(f"{site} is not there: install the packages first", file=sys.stderr)
        return 2
    removed = sum(_remove(path) for path in sorted(unread(site)))
    libraries = [path for path in sorted(site.rglob("*.so*")) if _is_file(path) and path.stat().st_size > SYMBOLS_WORTH]
    cut = sum(elf.shrink(path, at_least=SYMBOLS_WORTH) for path in libraries)
    print(f"removed {removed / 1e6:.0f} MB that nothing reads and {cut / 1e6:.0f} MB of symbol tables")
    return 0


def unread(site: Path) -> Iterator[Path]:
    """What goes as a whole; a folder may be named beside files inside of it."""
    for pattern in UNREAD:
        yield from site.glob(pattern)
    for name in FOLDERS:
        yield from (path for path in site.rglob(name) if path.is_dir())
    for pattern in FILES:
        yield from filter(_is_file, site.rglob(pattern))
    own = str(sysconfig.get_config_var("EXT_SUFFIX"))
    yield from (path for path in site.rglob("*.so") if OTHER_PYTHON.search(path.name) and not path.name.endswith(own))


def _remove(path: Path) -> int:
    """Removes a file or folder, unless it went with another; bytes."""
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
