#!/usr/bin/env python3
"""Turn the published PyTorch wheel for CUDA into a CPU build, at an eighth of the size with its dependencies.

For machines that reach only one package index, whose PyTorch is the build for CUDA. With CPU_INDEX (see build.sh) the
image has PyTorch's CPU build, of which this removes only symbol tables.

usage: slim_torch.py SITE_PACKAGES

torch must be installed there without its dependencies (pip --no-deps). Code for CPUs stays:

- the device code of PyTorch's CUDA library is cut out of the file (see elf.py), with the symbol tables for debuggers;
- libraries that are only loaded once a GPU is used are removed;
- the CUDA libraries that PyTorch's are linked to become stubs, whose functions return cudaErrorNoDevice, as the real
  ones do on a machine without a GPU.

Needs gcc and binutils.
"""

import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import elf

LOADED_WITH_A_GPU = ("libtorch_cuda_linalg.so", "libcaffe2_nvrtc.so")
CUDA_LIBRARY = re.compile(r"lib(cu|nv|nccl)")
"""Sonames of the CUDA packages that torch depends on."""
CUDA_FUNCTION = re.compile(r"_?(cu|nccl|nv)")
NO_DEVICE = 100
"""cudaErrorNoDevice and CUDA_ERROR_NO_DEVICE, https://docs.nvidia.com/cuda/cuda-runtime-api, cudaError."""
DEVICE_CODE = ".nv_fatbin"
"""Section with the GPU code of nvcc's programs."""

Stubs = dict[str, dict[str, set[str]]]
"""soname -> symbol version, or "" -> symbols."""


@dataclass(frozen=True)
class Library:
    """Dynamic section of a shared library; undefined symbols are written name@version, or name alone."""

    name: str
    needed: tuple[str, ...]
    undefined: frozenset[str]
    defined: frozenset[str]
    versions: dict[str, str] = field(default_factory=dict)
    """Symbol version -> soname of the library that it is required from."""


def main(site: Path) -> int:
    """Slim torch in place, print the changes, and return the exit status."""
    folder = site / "torch" / "lib"
    if not folder.is_dir():
        print(f"{folder}: no such folder. Install torch into {site} first.", file=sys.stderr)
        return 2
    for name in LOADED_WITH_A_GPU:
        (folder / name).unlink(missing_ok=True)
    for soname, versions in sorted(plan([read(path) for path in _libraries(folder)]).items()):
        build(soname, versions, folder)
        print(f"{soname}: {sum(map(len, versions.values()))} stubs")
    for path in _libraries(folder):
        gain = elf.shrink(path, DEVICE_CODE)
        print(f"{path.name}: {path.stat().st_size / 1e6:.1f} MB, {gain / 1e6:.1f} MB less")
    return 0


def plan(libraries: Iterable[Library]) -> Stubs:
    """Return the stubs that the libraries need: the expected symbols of each missing CUDA library.

    A symbol without a version belongs to CUDA by its name, and can be in any stub, since the loader searches all.
    """
    libraries = list(libraries)
    present = {library.name for library in libraries}
    missing = {name for library in libraries for name in library.needed if CUDA_LIBRARY.match(name)} - present
    stubs: Stubs = {name: defaultdict(set) for name in missing}
    defined = frozenset().union(*(library.defined for library in libraries))
    for library in libraries:
        for symbol in library.undefined:
            name, _, version = symbol.partition("@")
            soname = library.versions.get(version) if version else min(missing, default=None)
            if soname in stubs and name not in defined and (version or CUDA_FUNCTION.match(name)):
                stubs[soname][version].add(name)
    return stubs


def read(path: Path) -> Library:
    """Return the dynamic section of a shared library, by nm and readelf."""
    versions: dict[str, str] = {}
    for part in _output("readelf", "-VW", path).split("File: ")[1:]:
        soname = part.split()[0]
        versions |= dict.fromkeys(re.findall(r"Name: (\S+)", part), soname)
    return Library(
        name=path.name,
        needed=tuple(re.findall(r"\(NEEDED\).*\[(.*)\]", _output("readelf", "-dW", path))),
        undefined=_symbols(path, "--undefined-only"),
        defined=frozenset(symbol.partition("@")[0] for symbol in _symbols(path, "--defined-only")),
        versions=versions,
    )


def build(soname: str, versions: dict[str, set[str]], folder: Path) -> None:
    """Compile a stub library, whose symbols have the versions that other libraries require."""
    functions = sorted(set().union(*versions.values()))
    source = "".join(f"int {name}(void) {{ return {NO_DEVICE}; }}\n" for name in functions)
    named = {version: names for version, names in sorted(versions.items()) if version}
    script = folder / "stub.map"
    script.write_text("".join(f"{version} {{ {'; '.join(sorted(names))}; }};\n" for version, names in named.items()))
    command = ["gcc", "-w", "-Os", "-fno-builtin", "-nostdlib", "-shared", "-fPIC", "-s"]
    command += [f"-Wl,-soname,{soname},--build-id=none", *([f"-Wl,--version-script={script}"] if named else [])]
    try:
        subprocess.run([*command, "-x", "c", "-", "-o", folder / soname], input=source, text=True, check=True)
    finally:
        script.unlink()


def _libraries(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.so*") if not path.is_symlink())


def _symbols(path: Path, which: str) -> frozenset[str]:
    return frozenset(line.split()[0] for line in _output("nm", "-D", "-P", which, path).splitlines())


def _output(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1])))
