"""tools/gpu_session.sh: its packages suffice beside torch; its tests keep their results when cut off, and continue."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

from podscale.util import host_info
from tools import gpu_session_checks, gpu_session_page

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools" / "gpu_session.sh"

ONLY_THESE = """
import os, re, sys
from importlib import metadata
from importlib.machinery import PathFinder

def name(text):
    return re.sub(r"[-_.]+", "-", re.match(r"[\\w.-]+", text).group().lower())

present, todo = set(map(name, os.environ["SESSION_PACKAGES"].split())), ["torch", "torchvision"]
while todo:
    package = name(todo.pop())
    if package not in present:
        present.add(package)
        try:
            todo += [r for r in metadata.requires(package) or [] if "extra ==" not in r]
        except metadata.PackageNotFoundError:
            pass
absent = {m for m, owners in metadata.packages_distributions().items() if not present & set(map(name, owners))}

class Present(PathFinder):
    @classmethod
    def find_spec(cls, module, path=None, target=None):
        if module.partition(".")[0] in absent - {"podscale", "components", "pipelines", "tests"}:
            return None
        return PathFinder.find_spec(module, path, target)

def version(package, real=metadata.version):
    if name(package) not in present:
        raise metadata.PackageNotFoundError(package)
    return real(package)

sys.meta_path[:] = [Present if finder is PathFinder else finder for finder in sys.meta_path]
metadata.version = version
"""
"""Module `sitecustomize`, so that it holds in child processes too."""

COMMANDS = """
import pytest
from podscale.cli import main
assert main(["bench", "train", "--help"]) == 0
assert main(["bench", "train", "--no-such-option"]) == 2
assert main(["bench", "input", "--source", "digits", "--loaders", "reference", "--seconds", "0.1"]) == 0
assert main(["doctor", "--workspace", "/tmp", "--json"]) in (0, 2)
import podscale.bench.sweep, podscale.pytorch.throughput_benchmark, podscale.pytorch.link_benchmark
import podscale.pytorch.trainer, podscale.training.training_logger, podscale.data.loaders.build_loader
"""


TESTS = """
import ast, importlib, sys
from pathlib import Path
import pytest
arguments = ["-c", "/dev/null", "--rootdir", ".", "--import-mode=importlib", "-p", "no:cacheprovider", "-m", "gpu"]
code = pytest.main([*arguments, "-q", "-p", "tests.support.gpu_documents", "tests/gpu"])
assert code == 0, code
for path in Path("tests/gpu").glob("*.py"):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                importlib.import_module(alias.name)
        elif isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module)
            for alias in node.names:
                hasattr(module, alias.name) or importlib.import_module(f"{node.module}.{alias.name}")
"""
"""The files of tests/gpu can be collected, their documents are valid, and all that they import can be imported."""

STAGES = """
import sys
from podscale.cli import main
small = "model.name=resnet18 model.stem=small model.width=4 input.image_size=16 train.epochs=1 train.global_batch=64 " \
    "train.schedule.warmup_epochs=0 launch.threads=1 launch.processes=1"
for stage in ("shard", "train", "evaluate", "report"):
    options = [word for option in [*small.split(), f"run.workspace={sys.argv[1]}"] for word in ("--set", option)]
    assert main([stage, *options]) == 0, stage
"""
"""The stages that the session runs, with the PyTorch engine."""


def packages() -> str:
    listed = re.search(r"PACKAGES='(.*?)'", SCRIPT.read_text(encoding="utf-8"), re.DOTALL)
    assert listed is not None
    return " ".join(listed.group(1).split())


def run(listed: str, program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a program to which only torch, torchvision, what they need, and the listed packages are installed."""
    (folder / "sitecustomize.py").write_text(ONLY_THESE, encoding="utf-8")
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},  # of this pytest
        "PYTHONPATH": f"{folder}:{ROOT}",
        "SESSION_PACKAGES": listed,
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # the plugins of this environment
    }
    command = [sys.executable, "-c", program, str(folder / "workspace")]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False, timeout=850)


@pytest.mark.timeout(900)  # programs that import torch, possibly on a busy machine
@pytest.mark.parametrize(
    "program", [COMMANDS, TESTS, pytest.param(STAGES, marks=pytest.mark.slow)], ids=["commands", "tests", "stages"]
)
def test_the_packages_suffice_beside_torch(program: str, tmp_path: Path) -> None:
    done = run(packages(), program, tmp_path)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("program", "package", "module"),
    [
        (COMMANDS, "annotated-doc", "annotated_doc"),
        (TESTS, "simplejpeg", "simplejpeg"),
        (TESTS, "iniconfig", "iniconfig"),
    ],
)
def test_a_missing_package_is_found(program: str, package: str, module: str, tmp_path: Path) -> None:
    done = run(re.sub(rf"\b{package} ", "", packages()), program, tmp_path)
    assert done.returncode != 0
    assert module in done.stdout + done.stderr


def test_a_document_that_a_gpu_test_cannot_train_is_found_without_a_gpu(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "gpu" / "conftest.py").read_text("utf-8"), "utf-8")
    messages = {"norm": "", "auto": "a worker replaces `auto`", "fast": "train.fused_kernels"}
    bodies = [
        f"def test_{kernels}(document, train_here, tmp_path):\n"
        f"    train_here(document(tmp_path, fused_kernels='{kernels}'), tmp_path)\n"
        for kernels in messages
    ]
    (tmp_path / "test_planted.py").write_text("".join(bodies), "utf-8")
    plugins = ["-p", "no:cacheprovider", "-p", "tests.support.gpu_documents"]
    options = ["-c", "/dev/null", "--rootdir", str(tmp_path), "--junitxml", str(tmp_path / "found.xml"), *plugins]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(tmp_path / "test_planted.py")],
        capture_output=True, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout
    found = {
        case.attrib["name"]: list(case.itertext())
        for case in ElementTree.parse(tmp_path / "found.xml").iter("testcase")
    }
    assert found.keys() == {f"test_{kernels}" for kernels in messages}
    for kernels, message in messages.items():
        assert bool(found[f"test_{kernels}"]) is bool(message), found
        assert message in "".join(found[f"test_{kernels}"])


def test_results_are_kept_and_a_session_continues(tmp_path: Path) -> None:
    """The session's own functions run three files, two at a time, of which the second hangs the first time."""
    tests = tmp_path / "tests" / "gpu"
    tests.mkdir(parents=True)
    hangs = f"time.sleep(0 if os.path.exists('{tmp_path}/again') else 600)"
    bodies = {"a": f"open('{tmp_path}/runs', 'a').write('a'); assert False", "b": hangs, "c": "assert True"}
    for name, body in bodies.items():
        head = "import os, time, pytest\npytestmark = pytest.mark.gpu\n"
        (tests / f"test_{name}.py").write_text(f"{head}def test_quick(): pass\ndef test_it(): {body}\n", "utf-8")
    functions = re.findall(
        r"^(?:run_test_file|tests)\(\) \{.*?^\}", SCRIPT.read_text("utf-8"), re.DOTALL | re.MULTILINE
    )
    assert len(functions) == 2
    out = tmp_path / "out"
    settings = f"set -u; OUT={out} PYTHON={sys.executable} PYTHONPATH= JOBS=2"
    session = ["bash", "-c", "\n".join([settings, *functions, "tests 20"])]

    def results() -> list[str]:
        return re.findall(r"(?:\d failed, )?\d passed", (out / "gpu-tests.txt").read_text(encoding="utf-8"))

    with subprocess.Popen(session, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as first:
        deadline = time.monotonic() + 60
        while not (out / "gpu-tests.txt").exists() or len(results()) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert first.poll() is None, "the results of the others are there before the hanging file ends"
        printed, _ = first.communicate(timeout=100)
    assert results() == ["1 failed, 1 passed", "1 passed", "2 passed"]
    assert printed.count(" passed") == 3
    (tmp_path / "again").touch()
    subprocess.run(session, cwd=tmp_path, capture_output=True, check=True, timeout=120)
    assert results() == ["1 failed, 1 passed", "2 passed", "2 passed"]
    assert (tmp_path / "runs").read_text() == "a", "a file that ended does not run again, though a test of it failed"
    assert sorted(path.name for path in (out / "gpu-tests").iterdir()) == ["test_a.txt", "test_b.txt", "test_c.txt"]


def test_the_stage_that_fails_is_named(tmp_path: Path) -> None:
    """No stage follows it; the other engine goes on."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho $3\ncase "$3 $*" in train*engine=jax) exit 7;; esac\n', "utf-8")
    python.chmod(0o755)
    (function,) = re.findall(r"^runs\(\) \{.*?^\}", SCRIPT.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    settings = f"set -u; OUT={tmp_path} TMPDIR={tmp_path} PYTHON={python}"
    subprocess.run(["bash", "-c", "\n".join([settings, function, "runs 60"])], check=True, timeout=100)
    failed = ["shard", "train", "podscale train: exit code 7 (jax; 124 at the limit of 60 s)"]
    assert (tmp_path / "gpu-run-jax.txt").read_text("utf-8").splitlines() == failed
    assert (tmp_path / "gpu-run-pytorch.txt").read_text("utf-8").split() == ["shard", "train", "evaluate", "report"]


def checks(python: Path | str, *packages: str, path: str = "") -> subprocess.CompletedProcess[str]:
    command = [str(python), str(ROOT / "tools" / "gpu_session_checks.py"), "/tmp", *packages]
    return subprocess.run(command, capture_output=True, text=True, env={"PATH": path}, check=False)


def test_what_a_bare_interpreter_misses_is_printed_and_nothing_starts(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True)
    done = checks(tmp_path / "bare" / "bin" / "python", "typer", "numpy")
    assert done.returncode == 2
    assert re.match(r"versions: Python 3[.\d]+\n", done.stdout)
    for text in (
        "MISSING  torch and torchvision: not installed in ",
        "MISSING  packages: not installed: typer numpy. Set WHEELS to a folder",
        "note  gcc: no C compiler on the path. Install gcc and python3-dev (Debian)",
        "MISSING  driver: ",
        "note  jax: not installed. Install jax[cuda13]",
        "note  ncu: not on the path. Install NVIDIA Nsight Compute",
    ):
        assert text in done.stdout
    environment = {**os.environ, "PYTHON": str(tmp_path / "bare" / "bin" / "python"), "OUT": str(tmp_path / "out")}
    session = subprocess.run(["bash", str(SCRIPT)], env=environment, capture_output=True, text=True, check=False)
    assert session.returncode == 2
    assert "Traceback" not in session.stdout + session.stderr
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["gpu-checks.txt"]


@pytest.mark.parametrize(
    ("output", "code", "found", "returncode"),
    [
        ("0, 80000, 81559, 999.1", 0, "", 0),
        ("0, 80000, 81559, 999.1\n1, 100, 81559, 999.1", 0, "note  GPU memory: GPU 1 has 100 of 81559 MiB free", 0),
        ("0, [N/A], [N/A], [N/A]", 0, "", 0),
        ("NVIDIA-SMI has failed", 9, "MISSING  driver: nvidia-smi fails: NVIDIA-SMI has failed", 2),
        ("", 0, "MISSING  driver: nvidia-smi fails: it printed nothing", 2),
    ],
)
def test_the_driver_and_the_memory_of_each_gpu_are_looked_at(
    tmp_path: Path, output: str, code: int, found: str, returncode: int
) -> None:
    for name, text in {"nvidia-smi": f"printf '%s' '{output}'; exit {code}", "gcc": "exit 0"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    done = checks(sys.executable, "numpy", path=str(tmp_path))
    assert done.returncode == returncode, done.stdout + done.stderr
    assert found in done.stdout
    if not found:
        assert not re.search(r"^(note|MISSING).*(driver|GPU memory|gcc|packages|torch)", done.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    ("driver", "cuda", "fits"),
    [
        ("580.65.06", "'13.2'", True),
        ("575.57.08", "'13.2'", False),
        ("575.57.08", "'12.8'", True),
        ("470.1", "'12.8'", False),
        ("470.1", "None", True),
    ],
)
def test_the_driver_must_be_as_new_as_the_cuda_of_torch(
    driver: str, cuda: str, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read from the files of the installed torch, which is not imported."""
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho '0, 80000, 81559, {driver}'\n", encoding="utf-8")
    (tmp_path / "nvidia-smi").chmod(0o755)
    site = tmp_path / "site"
    (site / "torch").mkdir(parents=True)
    (site / "torch-2.11.0.dist-info").mkdir()
    (site / "torch-2.11.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.11.0\n")
    (site / "torch" / "version.py").write_text(f"__version__ = '2.11.0'\ncuda: Optional[str] = {cuda}\n")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.syspath_prepend(site)
    found = [problem for problem in gpu_session_checks.find_problems(tmp_path, []) if problem.name == "driver"]
    assert [problem.fatal for problem in found] == ([] if fits else [True])
    assert gpu_session_checks.MINIMAL_DRIVERS == host_info.MINIMAL_DRIVERS


def test_a_hanging_nvidia_smi_is_a_missing_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexec sleep 60\n", encoding="utf-8")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(gpu_session_checks, "SMI_TIMEOUT", 0.2)
    (problem,) = (found for found in gpu_session_checks.find_problems(tmp_path, []) if found.name == "driver")
    assert problem.fatal
    assert "nvidia-smi" in problem.problem


def test_a_page_has_what_a_session_found_and_no_place_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    (out / "gpu-tests").mkdir(parents=True)
    (out / "gpu-inductor").mkdir()
    monkeypatch.setenv("PYTHON", f"{tmp_path}/bare/python")
    files = {
        "gpu-checks.txt": f"versions: Python 3.12.1\nMISSING  torch: not installed in {tmp_path}/bare/python\n",
        "gpu-doctor.txt": f"ok       system   Linux-6\nok       gloo     in {out}/here\n",
        "gpu-tests/test_a.txt": "2 skipped, 1 passed in 0.50s\nNot run: 2 tests. They need a GPU 2 (make bench-gpu).\n",
        "gpu-tests/test_b.cut.txt": "....\n",
        "gpu-run-jax.txt": f"one line\npodscale: no jax in {out}/runs\npodscale train: exit code 2\n",
        "gpu-inductor/kernel.py": "",
        "train-cpu.json": json.dumps(
            [
                {"name": "bf16", "found": {"images_per_second": 1234.5}, "reason": "", "seconds": 9.6},
                {"name": "graph", "found": None, "reason": "no CUDA | device", "seconds": 3.0},
            ]
        ),
    }
    for name, text in files.items():
        (out / name).write_text(text, "utf-8")
    gpu_session_page.write_page(out, tmp_path / "page.md", "make bench-gpu REHEARSE=1", "Here.")
    page = (tmp_path / "page.md").read_text("utf-8")
    assert str(tmp_path) not in page
    for line in (
        "Command: `make bench-gpu REHEARSE=1`  ",
        "Here.",
        "MISSING  torch: not installed in PYTHON",
        "ok       gloo     in OUT/here",
        "| `test_a.txt` | 2 skipped, 1 passed in 0.50s | 2 tests. They need a GPU 2 (make bench-gpu). |",
        "| `test_b.cut.txt` | no summary |  |",
        "| jax | podscale: no jax in OUT/runs; podscale train: exit code 2 |",
        "| bf16 | 10 | 1,234.5 images/s |",
        "| graph | 3 | no CUDA / device |",
        "| `gpu-tests/test_b.cut.txt` | 5 |",
    ):
        assert line in page.splitlines()
    assert "Linux-6" not in page
    assert "kernel.py" not in page
