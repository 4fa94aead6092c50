"""No library of an image needs a file that images/slim.py or slim_torch.py removed."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.containers import Engine

pytestmark = pytest.mark.timeout(900)
FROM_THE_NODE = re.compile(r"lib(cuda|nvidia-ml|nvcuvid|nvidia-encode|nvrm_gpu)\.so")
"""Libraries of the GPU driver, which are missing on machines without a GPU."""
FROM_THE_NETWORK = re.compile(r"lib(mlx5|ibverbs|rdmacm|fabric|ucs|ucp|mpi|pmix|oshmem|doca\w*)\.so")
"""Libraries of the transports of NVSHMEM and cuFile, which try them in turn and use those that load."""
AS_PUBLISHED = {("libquadmath.so.0", "libgfortran.so.5")}
"""Libraries that the published packages already lack."""


def test_every_library_has_what_it_is_linked_to(engine: Engine, image: str):
    if shutil.which("readelf") is None:
        pytest.skip("readelf is not installed: it is in binutils")
    with engine.mounted(image) as root:
        libraries = [path for path in root.rglob("*.so*") if path.is_file() and not path.is_symlink()]
        present = {path.name for path in root.rglob("*.so*")}
        needed = linked(libraries)
    missing = {
        (name, library.name)
        for library, names in needed.items()
        for name in names
        if name not in present and not FROM_THE_NODE.match(name) and not FROM_THE_NETWORK.match(name)
    }
    assert len(needed) > 50
    assert missing - AS_PUBLISHED == set()


def linked(libraries: list[Path]) -> dict[Path, list[str]]:
    """Return the names that each shared library is linked to; files that are not libraries are ignored."""
    shared = [path for path in libraries if path.open("rb").read(4) == b"\x7fELF"]
    needed = {}
    for path in shared:
        dynamic_section = subprocess.run(["readelf", "-dW", path], capture_output=True, text=True, check=True).stdout
        needed[path] = re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic_section)
    return needed
