"""Small form of every benchmark, and the command of every committed page of results."""

import hashlib
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.harness import RESULTS, ROOT, UNAVAILABLE, Options
from tests.support.examples import runs_examples
from tests.support.xla import QUICK_XLA

BENCHMARKS = ROOT / "benchmarks"
HELPERS = {"__init__", "conditions", "harness", "http_load", "measure", "samples", "world"}
"""Modules that benchmarks share; all others are benchmarks."""
OTHER_DATA = {"parity-digits.md", "parity-photographs.md", "input-64.md"}
"""Pages named after their data or their image size; the small form has others."""
ENVIRONMENT = {
    "XLA_FLAGS": QUICK_XLA,
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
SECONDS = 240
"""Timeout of one small form, for a busy machine; on an idle one it takes some seconds."""
SmallRun = tuple[subprocess.CompletedProcess[str], Path]
"""Finished small form, and the folder of its pages."""


def names() -> list[str]:
    """Return the modules and packages of benchmarks/ that are no helpers."""
    modules = {path.stem for path in BENCHMARKS.glob("*.py")}
    packages = {path.parent.name for path in BENCHMARKS.glob("*/__init__.py")}
    return sorted((modules | packages) - HELPERS)


def main_file(name: str) -> Path:
    """Return the file that `python -m benchmarks.NAME` runs."""
    module = BENCHMARKS / f"{name}.py"
    return module if module.exists() else BENCHMARKS / name / "__main__.py"


def pages() -> list[Path]:
    return sorted(RESULTS.rglob("*.md"))


def command_of(page: Path) -> str:
    """Return the command in the head of a page of results; empty if there is none."""
    match = re.search(r"^Command: `(.+)`", page.read_text(encoding="utf-8"), re.MULTILINE)
    return match[1] if match else ""


def results_digest() -> str:
    digest = hashlib.sha256()
    for path in sorted(path for path in RESULTS.rglob("*") if path.is_file()):
        digest.update(str(path).encode() + path.read_bytes())
    return digest.hexdigest()


COMMITTED = results_digest()


@pytest.fixture(scope="module")
def small_forms(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[SmallRun]]]:
    """Run the selected small forms, two at a time, since each idles while its ranks start."""
    chosen = [item.callspec.params["name"] for item in request.session.items if _is_small_form(item)]
    folders = {name: tmp_path_factory.mktemp(name) for name in chosen}
    with ThreadPoolExecutor(2) as pool:
        futures = {name: pool.submit(run, name, folder) for name, folder in folders.items()}
        yield futures
        for future in futures.values():
            future.cancel()


def _is_small_form(item: pytest.Item) -> bool:
    return getattr(item, "originalname", "") == test_small_form_runs_and_writes_all_pages.__name__


@runs_examples
@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize("name", names())
def test_small_form_runs_and_writes_all_pages(name: str, small_forms: dict[str, Future[SmallRun]]) -> None:
    process, folder = small_forms[name].result()
    if process.returncode == UNAVAILABLE:
        pytest.skip(process.stderr.strip().splitlines()[-1])
    assert process.returncode == 0, process.stderr[-4000:]
    written = {str(path.relative_to(folder)): path for path in folder.rglob("*.md")}
    assert written
    for path in written.values():
        assert f"python -m benchmarks.{name}" in command_of(path), f"{path.name} does not name its command"
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"\bnan\b", text), f"{path.name} has a value that is not a number"
        for picture in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text):
            assert "<svg" in (path.parent / picture).read_text(encoding="utf-8")
    committed = {str(page.relative_to(RESULTS)) for page in pages() if f"benchmarks.{name}" in command_of(page).split()}
    assert committed - OTHER_DATA <= set(written), "the small form does not write all committed pages"
    assert results_digest() == COMMITTED, "a small form changed committed results"


def run(name: str, folder: Path) -> SmallRun:
    """Run a small form; stop it and its processes after the timeout."""
    command = [sys.executable, "-m", f"benchmarks.{name}", "--small", "--results", str(folder)]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)  # so that it removes its network namespaces
        out, err = process.communicate(timeout=30)
    return subprocess.CompletedProcess(command, process.returncode, out, err), folder


def test_a_small_form_never_writes_to_committed_results(monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments in ([], ["--results", str(RESULTS)]):
        monkeypatch.setattr(sys, "argv", ["benchmark", "--small", *arguments])
        with pytest.raises(SystemExit) as error:
            Options("").read()
        assert error.value.code == 2


@pytest.mark.parametrize(("arguments", "expected"), [([], 7), (["--small"], 1), (["--small", "--rounds", "3"], 3)])
def test_sizes_follow_from_the_form(
    arguments: list[str], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark", *arguments, "--results", str(tmp_path)])
    parser = Options("")
    parser.add_size("--rounds", full=7, small=1, type=int)
    assert parser.read().rounds == expected


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(RESULTS)))
def test_committed_page_names_a_command_that_exists(page: Path) -> None:
    if page.name == "README.md":
        commands = re.findall(r"`(podscale study [^`]+)`", page.read_text(encoding="utf-8"))
    else:
        commands = [command_of(page)]
    assert all(commands), "a page of results starts with `Command: ...`"
    assert commands
    for command in commands:
        assert unknown_part(command) == ""


def test_the_table_of_measurements_names_every_page() -> None:
    table = (RESULTS.parent / "README.md").read_text(encoding="utf-8")
    linked = {RESULTS.parent / target for target in re.findall(r"\]\((results/[^)#]+)", table)}
    assert {page for page in pages() if page.parent == RESULTS} - linked == set()


@pytest.mark.parametrize(
    ("command", "part"),
    [
        ("python benchmarks/reducer.py", "reducer.py"),
        ("python -m benchmarks.nothing", "nothing"),
        ("python -m benchmarks.reducer --epochs 3", "--epochs"),
        ("podscale study nothing", "nothing"),
        ("podscale study digits-batch --epochs 3", "--epochs"),
        ("podscale nothing", "nothing"),
        ("make nothing MINUTES=3", "nothing"),
    ],
)
def test_a_command_that_does_not_exist_is_found(command: str, part: str) -> None:
    assert part in unknown_part(command)


def unknown_part(command: str) -> str:
    """Return the first part of a command that does not exist; empty if all parts exist."""
    words = [word for word in shlex.split(command) if not re.fullmatch(r"[A-Z_]+=.*", word)]
    options = [word for word in words if word.startswith("--")]
    if words[:2] == ["python", "-m"] and words[2].startswith("benchmarks."):
        main = main_file(words[2].removeprefix("benchmarks."))
        if not main.exists():
            return words[2]
        known = main.read_text(encoding="utf-8") + (BENCHMARKS / "harness.py").read_text(encoding="utf-8")
        return next((option for option in options if f'"{option}"' not in known), "")
    if words[0] == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        return next((word for word in words[1:] if f"\n{word}: " not in makefile), "")
    if words[0] != "podscale" or not (known_options := command_options(words[1:])):
        return command
    unknown_option = next((option for option in options if option not in known_options), "")
    return unknown_option or (unknown_study(words[2]) if words[1] == "study" else "")


def command_options(words: list[str]) -> set[str]:
    """Return the options of a command of `podscale`, named by its first words; empty if there is none."""
    from typer.main import get_command

    from podscale.cli import app

    command = get_command(app)
    for word in words:
        if (commands := getattr(command, "commands", None)) is None:
            break
        if word not in commands:
            return set()
        command = commands[word]
    return {option for parameter in command.params for option in parameter.opts}


def unknown_study(name: str) -> str:
    return "" if (ROOT / "pipelines" / "studies" / f"{name}.yaml").exists() else name


def test_every_file_of_results_belongs_to_a_page() -> None:
    for path in sorted(RESULTS.rglob("*")):
        if not path.is_file() or path.suffix == ".md":
            continue
        page = path.with_name(path.name.split(".")[0] + ".md")
        texts = (other.read_text(encoding="utf-8") for other in path.parent.glob("*.md"))
        assert page.exists() or any(path.name in text for text in texts), f"no page of results names {path.name}"
