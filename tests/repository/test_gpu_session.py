"""tools/gpu_session.sh: its packages suffice beside torch; its tests keep their results when cut off, and continue."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tools import gpu_session_checks

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools" / "gpu_session.sh"

ONLY_THESE = """
import re, sys
from importlib import metadata

def name(text):
    return re.sub(r"[-_.]+", "-", re.match(r"[\\w.-]+", text).group().lower())

present, todo = set(map(name, sys.argv[1].split())), ["torch", "torchvision"]
while todo:
    package = name(todo.pop())
    if package not in present:
        present.add(package)
        try:
            todo += [r for r in metadata.requires(package) or [] if "extra ==" not in r]
        except metadata.PackageNotFoundError:
            pass
absent = {m for m, owners in metadata.packages_distributions().items() if not present & set(map(name, owners))}

class Absent:
    def find_spec(self, module, path=None, target=None):
        if module.partition(".")[0] in absent - {"podscale", "components", "pipelines", "tests"}:
            raise ModuleNotFoundError(f"No module named {module!r} in the session", name=module)

def version(package, real=metadata.version):
    if name(package) not in present:
        raise metadata.PackageNotFoundError(package)
    return real(package)

sys.meta_path.insert(0, Absent())
metadata.version = version
"""

USES = """
import pytest
from podscale.cli import main
assert main(["bench", "train", "--help"]) == 0
assert main(["bench", "train", "--no-such-option"]) == 2
assert main(["bench", "input", "--source", "digits", "--loaders", "reference", "--seconds", "0.1"]) == 0
assert main(["doctor", "--workspace", "/tmp", "--json"]) in (0, 2)
import podscale.bench.sweep, podscale.pytorch.throughput_benchmark, podscale.pytorch.link_benchmark
import podscale.pytorch.trainer, podscale.training.training_logger, podscale.data.loaders.build_loader
"""


def packages() -> str:
    listed = re.search(r"PACKAGES='(.*?)'", SCRIPT.read_text(encoding="utf-8"), re.DOTALL)
    assert listed is not None
    return " ".join(listed.group(1).split())


def run(listed: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", ONLY_THESE + USES, listed]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, timeout=200)


def test_the_packages_suffice_beside_torch() -> None:
    done = run(packages())
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_missing_package_is_found() -> None:
    done = run(packages().replace("annotated-doc ", ""))
    assert done.returncode != 0
    assert "annotated_doc" in done.stderr


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


def checks(python: Path | str, *packages: str, path: str = "") -> subprocess.CompletedProcess[str]:
    command = [str(python), str(ROOT / "tools" / "gpu_session_checks.py"), "/tmp", *packages]
    return subprocess.run(command, capture_output=True, text=True, env={"PATH": path}, check=False)


def test_what_a_bare_interpreter_misses_is_printed_and_nothing_starts(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True)
    done = checks(tmp_path / "bare" / "bin" / "python", "typer", "numpy")
    assert done.returncode == 2
    for text in (
        "MISSING  torch and torchvision: not installed in ",
        "MISSING  packages: not installed: typer numpy. Set WHEELS to a folder",
        "note  gcc: no C compiler on the path. Install gcc and python3-dev (Debian)",
        "MISSING  driver: ",
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
        ("0, 80000, 81559", 0, "", 0),
        ("0, 80000, 81559\n1, 100, 81559", 0, "note  GPU memory: GPU 1 has 100 of 81559 MiB free", 0),
        ("0, [N/A], [N/A]", 0, "", 0),
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
        assert not re.search(r"driver|GPU memory|gcc|packages|torch", done.stdout)


def test_a_hanging_nvidia_smi_is_a_missing_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexec sleep 60\n", encoding="utf-8")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(gpu_session_checks, "SMI_TIMEOUT", 0.2)
    (problem,) = (found for found in gpu_session_checks.find_problems(tmp_path, []) if found.name == "driver")
    assert problem.fatal
    assert "nvidia-smi" in problem.problem
