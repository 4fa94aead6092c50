"""images/slim_torch.py and elf.py: a reduced library works as before and is smaller."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

IMAGES = Path(__file__).resolve().parents[2] / "images"

CUDA = """
int cudaGetDeviceCount(int *count) { *count = 8; return 0; }
int cudaMalloc(void) { return 0; }
"""
CUBLAS = "int cublasCreate(void) { return 0; }"
TORCH = """
int cudaGetDeviceCount(int *), cudaMalloc(void), cublasCreate(void);
const char words[] = "read-only, before the device code";
__attribute__((section(".nv_fatbin"))) const unsigned char device_code[300000] = {[150000] = 6};
__attribute__((section("zz_after"))) const char after[] = "read-only, after the device code";
int counter = 41;
int count(void) { return ++counter; }
int devices(void) { int count = -1; return cudaGetDeviceCount(&count); }
int allocate(void) { return cudaMalloc(); }
int create(void) { return cublasCreate(); }
int sum(void) { int sum = 0; for (int i = 0; i < sizeof device_code; i++) sum += device_code[i]; return sum; }
const char *first(void) { return words; }
const char *second(void) { return after; }
"""
ASK = """
import ctypes, json, sys
library = ctypes.CDLL(sys.argv[1])
library.first.restype = library.second.restype = ctypes.c_char_p
names = ("devices", "allocate", "create", "sum", "count", "first", "second")
found = {name: getattr(library, name)() for name in names}
print(json.dumps({name: value.decode() if isinstance(value, bytes) else value for name, value in found.items()}))
"""
WORDS = {"first": "read-only, before the device code", "second": "read-only, after the device code", "count": 42}


@pytest.fixture(scope="module", autouse=True)
def slim_torch():
    if any(shutil.which(tool) is None for tool in ("gcc", "nm", "readelf")):
        pytest.skip("gcc and binutils are needed to make libraries to slim")
    sys.path.insert(0, str(IMAGES))
    import slim_torch

    yield slim_torch
    sys.path.remove(str(IMAGES))


def compiled(source: str, target: Path, *flags: str) -> Path:
    command = ["gcc", "-w", "-g", "-shared", "-fPIC", f"-Wl,-soname,{target.name}", "-x", "c", "-", "-o", target]
    subprocess.run([*command, *flags], input=source, text=True, check=True)
    return target


def ask(library: Path, **environment: str) -> dict[str, object]:
    """Return the results of the library's functions, called in another process."""
    ended = subprocess.run(
        [sys.executable, "-c", ASK, library], capture_output=True, text=True, env=environment, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


@pytest.fixture
def site(tmp_path):
    """site-packages with a library that is linked to CUDA libraries, one of them with versioned symbols."""
    folder, cuda = tmp_path / "site/torch/lib", tmp_path / "cuda"
    folder.mkdir(parents=True)
    cuda.mkdir()
    (cuda / "map").write_text("libcudart.so.13 { cudaGetDeviceCount; cudaMalloc; };")
    linked = [
        compiled(CUDA, cuda / "libcudart.so.13", f"-Wl,--version-script={cuda}/map"),
        compiled(CUBLAS, cuda / "libcublas.so.13"),
    ]
    compiled(TORCH, folder / "libtorch_cuda.so", "-x", "none", *map(str, linked), "-Wl,-rpath,$ORIGIN")
    compiled(CUBLAS, folder / "libtorch_cuda_linalg.so")
    return tmp_path / "site"


def test_the_slimmed_library_works_as_without_a_gpu(slim_torch, site, tmp_path, capsys):
    library = site / "torch/lib/libtorch_cuda.so"
    size = library.stat().st_size
    real = ask(library, LD_LIBRARY_PATH=str(tmp_path / "cuda"))
    assert real == {**WORDS, "devices": 0, "allocate": 0, "create": 0, "sum": 6}

    assert slim_torch.main(site) == 0

    assert "libcudart.so.13: 2 stubs" in capsys.readouterr().out
    assert ask(library) == {**WORDS, "devices": 100, "allocate": 100, "create": 100, "sum": 0}
    assert library.stat().st_size < size - 280_000
    assert not (site / "torch/lib/libtorch_cuda_linalg.so").exists()


def test_other_environments_keep_their_files(slim_torch, site, tmp_path):
    """uv and pip may hard-link one file into many environments."""
    library, other = site / "torch/lib/libtorch_cuda.so", tmp_path / "other.so"
    other.hardlink_to(library)
    before = other.read_bytes()
    slim_torch.main(site)
    assert other.read_bytes() == before != library.read_bytes()
    assert library.stat().st_mode == other.stat().st_mode


def test_slimming_twice_changes_nothing_more(slim_torch, site):
    slim_torch.main(site)
    once = {path.name: path.read_bytes() for path in (site / "torch/lib").iterdir()}
    slim_torch.main(site)
    assert {path.name: path.read_bytes() for path in (site / "torch/lib").iterdir()} == once


def test_a_cpu_build_keeps_its_libraries(slim_torch, tmp_path):
    folder = tmp_path / "torch/lib"
    folder.mkdir(parents=True)
    library = compiled("int add(int a, int b) { return a + b; }", folder / "libtorch_cpu.so")
    assert slim_torch.main(tmp_path) == 0
    assert [path.name for path in folder.iterdir()] == ["libtorch_cpu.so"]
    adds = "import ctypes, sys; assert ctypes.CDLL(sys.argv[1]).add(2, 3) == 5"
    assert subprocess.run([sys.executable, "-c", adds, library], check=False).returncode == 0


def test_a_symbol_belongs_to_the_library_that_its_version_names(slim_torch):
    libraries = [
        slim_torch.Library(
            "libtorch_cuda.so",
            needed=("libcudart.so.13", "libcudnn.so.9", "libc.so.6"),
            undefined=frozenset({"cudaFree@libcudart.so.13", "cudnnCreate", "cuInit", "malloc@GLIBC_2.2.5", "Tensor"}),
            defined=frozenset({"cuOwn"}),
            versions={"libcudart.so.13": "libcudart.so.13", "GLIBC_2.2.5": "libc.so.6"},
        ),
        slim_torch.Library("libtorch_python.so", ("libtorch_cuda.so",), frozenset({"cuOwn"}), frozenset()),
    ]
    assert slim_torch.plan(libraries) == {
        "libcudart.so.13": {"libcudart.so.13": {"cudaFree"}, "": {"cudnnCreate", "cuInit"}},
        "libcudnn.so.9": {},
    }


def test_without_torch(slim_torch, tmp_path, capsys):
    assert slim_torch.main(tmp_path) == 2
    assert str(tmp_path) in capsys.readouterr().err
