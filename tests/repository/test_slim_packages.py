"""images/slim.py: unused files are removed from installed packages, and the rest works."""

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

SLIM = Path(__file__).resolve().parents[2] / "images" / "slim.py"
LONG = "long_" * 2000
FUNCTIONS = "".join(f"int {LONG}{number}(void) {{ return {number}; }}\n" for number in range(60))
"""Static functions, with 600 kB of names for a debugger."""
SUFFIX = str(sysconfig.get_config_var("EXT_SUFFIX"))


def slim(site: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SLIM, site], capture_output=True, text=True, check=False)


def make(site: Path, *names: str) -> None:
    for name in names:
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(name)


def test_only_unused_files_are_removed(tmp_path):
    stays = (
        "package/__init__.py",
        "package/testing.py",
        f"package/module{SUFFIX}",
        "package/module.abi3.so",
        "package/contest/__init__.py",
        "nvidia/cu13/lib/libcusolver.so.12",
        "nvidia/cu13/include/cuda_fp16.h",
        "nvidia/nvshmem/lib/libnvshmem_host.so.3",
        "triton/_C/libtriton.so",
        "triton/backends/amd/compiler.py",
        "triton/backends/nvidia/lib/libdevice.10.bc",
        "torch/bin/torch_shm_manager",
    )
    goes = (
        "package/tests/test_module.py",
        "package/tests/library.a",
        "package/test/data.so",
        "package/module.pyi",
        "package/module.pxd",
        "package/library.a",
        "package/module.cpython-39-x86_64-linux-gnu.so",
        "package/module.cpython-315t-x86_64-linux-gnu.so",
        "nvidia/cu13/lib/libcusolverMg.so.12",
        "nvidia/nvshmem/lib/libnvshmem_device_sm_90.bc",
        "triton/_C/libproton.so",
        "triton/backends/nvidia/lib/cupti-blackwell/libcupti.so",
        "torch/bin/protoc-3.21",
        "torch/include/ATen/ATen.h",
    )
    make(tmp_path, *stays, *goes)
    ended = slim(tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()) == sorted(stays)


def test_libraries_lose_their_symbol_tables_and_work(tmp_path):
    if shutil.which("gcc") is None:
        pytest.skip("gcc is needed to make a library to slim")
    library, script = tmp_path / "package/library.so", tmp_path / "package/script.so"
    library.parent.mkdir()
    command = ["gcc", "-shared", "-fPIC", "-fvisibility=hidden", "-x", "c", "-", "-o", library]
    last = f'__attribute__((visibility("default"))) int last(void) {{ return {LONG}59(); }}'
    subprocess.run(command, input=FUNCTIONS + last, text=True, check=True)
    script.write_text("GROUP ( library.so )" * 50_000)  # a linker's script has the name of a library
    (tmp_path / "package/other.so").symlink_to("library.so")
    size, done = library.stat().st_size, slim(tmp_path)
    assert library.stat().st_size < size - 500_000
    assert "and 0 MB " not in done.stdout
    assert script.stat().st_size == 1_000_000
    assert (tmp_path / "package/other.so").is_symlink()
    asks = "import ctypes, sys; assert ctypes.CDLL(sys.argv[1]).last() == 59"
    assert subprocess.run([sys.executable, "-c", asks, library], check=False).returncode == 0
    assert "and 0 MB " in slim(tmp_path).stdout


def test_a_missing_folder_is_bad_input(tmp_path):
    ended = slim(tmp_path / "none")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "none" in ended.stderr
