"""images/steps/triton.sh: Triton finds its precompiled library in an image without a compiler."""

import os
import shutil
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "images" / "steps" / "triton.sh"
COMPILE = """
import sys
from pathlib import Path
from triton import backends
from triton.runtime.build import compile_so_from_file
source = sys.argv[1] or str(Path(backends.__file__).parent / "nvidia" / "driver.c")
print(compile_so_from_file(source, "cuda_utils", library_dirs=["/nowhere"], libraries=["libcuda.so.1"]))
"""


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    header = Path(sysconfig.get_paths(scheme="posix_prefix")["include"], "Python.h")
    if shutil.which("gcc") is None or not header.exists() or find_spec("triton") is None:
        pytest.skip("needs gcc, Python's headers and Triton")
    folder = tmp_path_factory.mktemp("prefix")
    (folder / "bin").mkdir()
    (folder / "bin" / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (folder / "bin" / "python").chmod(0o755)
    subprocess.run(["sh", SCRIPT, folder], check=True)
    return folder


def compile_by(prefix: Path, cache: Path, source: Path | str = "") -> subprocess.CompletedProcess[str]:
    """Compile as Triton does at the first launch of a kernel, with triton-cc as the only compiler."""
    variables = {
        **os.environ,
        "CC": str(prefix / "bin" / "triton-cc"),
        "TRITON_CACHE_DIR": str(cache),
        "PATH": "/usr/bin:/bin",
    }
    command = [sys.executable, "-c", COMPILE, source]
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=False)


def test_the_library_is_handed_out(prefix, tmp_path):
    ended = compile_by(prefix, tmp_path)
    assert ended.returncode == 0, ended.stderr
    library = Path(ended.stdout.strip())
    assert library.read_bytes() == (prefix / "lib/triton/driver.so").read_bytes()
    symbols = subprocess.check_output(["nm", "-D", library], text=True)
    assert "T PyInit_cuda_utils" in symbols


def test_anything_else_is_refused(prefix, tmp_path):
    (tmp_path / "other.c").write_text("int other(void) { return 1; }")
    ended = compile_by(prefix, tmp_path, tmp_path / "other.c")
    assert ended.returncode != 0
    assert "compiler" in ended.stderr


def test_a_triton_that_compiles_launchers_fails_the_build(tmp_path):
    """Triton 3.6 and older compile C for each signature of a kernel; an image with the stand-in could run none."""
    backend = tmp_path / "site" / "triton" / "backends" / "nvidia"
    backend.mkdir(parents=True)
    (tmp_path / "site" / "triton" / "__init__.py").touch()
    (backend / "driver.c").write_text("int PyInit_cuda_utils(void) { return 0; }")
    (backend / "driver.py").write_text('mod = compile_module_from_src(src=src, name="__triton_launcher")\n')
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    variables = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    built = subprocess.run(["sh", SCRIPT, tmp_path], env=variables, capture_output=True, text=True, check=False)
    assert built.returncode == 1, built.stderr
    assert not (tmp_path / "bin" / "triton-cc").exists()
