"""Change one formula or constant at a time and check that a test fails: `python -m tools.mutation_check [PART ...]`.

Each mutation replaces a text of one module as a forked child imports it, and runs the tests that should notice. No
source file changes. Tests of several ranks do not notice, because their ranks are no children of it. A mutation that no
test notices is reported, and the exit code is 1. The outcomes are kept in `tests/support/mutation_outcomes.md`, with
the first test that failed.
Constants of presets are changed, one at a time, by `test_preset_trajectories.py` in `tests/distributed/pytorch` and
`tests/jax`; the list has these changes too.

Args (of the command):
    PART: run only the mutations whose name contains one of these.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest
import torch  # noqa: F401 (imported once, before the forks)

from tests.support import preset_mutations
from tools.mutation_table import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parents[1]


class MutatedSource(Loader, MetaPathFinder):
    """Finder and loader of one module, with a replacement in its source."""

    def __init__(self, mutation: Mutation) -> None:
        self._path = ROOT / mutation.path
        self._module = mutation.path.removesuffix(".py").replace("/", ".")
        text = self._path.read_text(encoding="utf-8")
        assert text.count(mutation.old) == 1, f"{mutation.name}: the text is not in {mutation.path} once"
        self._source = text.replace(mutation.old, mutation.new)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return spec_from_loader(name, self, origin=str(self._path)) if name == self._module else None

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self._source, str(self._path), "exec"), module.__dict__)


class FirstFailure:
    """Plugin of pytest that writes the name of the first failing test to a file descriptor."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            os.write(self._pipe, f"{report.nodeid}\n".encode())


def noticing_test(mutation: Mutation) -> str:
    """Return the first test that fails with the mutation, which only a forked child sees; "" if none does."""
    finder = MutatedSource(mutation)
    arguments = ["-q", "-x", "-n0", "-p", "no:cacheprovider", *mutation.tests.split()]
    if mutation.tests.startswith("tests/jax/"):
        arguments.append("--noconftest")  # its conftest runs tests in a process that would import the original
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        sys.meta_path.insert(0, finder)
        with Path(os.devnull).open("w", encoding="utf-8") as sink, redirect_stdout(sink), redirect_stderr(sink):
            code = pytest.main(arguments, plugins=[FirstFailure(writer)])
        os._exit(int(code))
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as pipe:
        failures = pipe.read().splitlines()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 1), f"{mutation.name}: pytest {mutation.tests} ended with exit code {code}"
    return failures[0] if failures else ""


OUTCOMES = ROOT / "tests" / "support" / "mutation_outcomes.md"
OUTCOMES_HEAD = """# Outcomes of the mutation check

Each formula that was changed, and the first test that failed with the change. `make mutation-check` runs all and writes
this list; `python -m tools.mutation_check PART` runs those whose names contain PART.

| mutation | file | noticed by |
|---|---|---|
"""
PRESETS_HEAD = """
## Constants of presets

Each changed constant or form of a published preset, and the part of its golden trajectory that differs. These are tests
of the suite: `test_a_changed_constant_or_form_is_noticed` in `tests/distributed/pytorch/test_preset_trajectories.py`,
and in `tests/jax/test_preset_trajectories.py` for losses and variances.

| preset | changed | seen in |
|---|---|---|
"""
NOT_RUN, MISSED = "not run yet", "**no test**"


def read_outcomes() -> dict[str, str]:
    """Return the last outcome of each mutation by name."""
    formulas = OUTCOMES.read_text(encoding="utf-8").partition(PRESETS_HEAD)[0] if OUTCOMES.exists() else ""
    lines = formulas.splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return {name: noticed for name, _, noticed in rows[1:]}


def outcomes_page(outcomes: Mapping[str, str]) -> str:
    """Return the page with the outcomes of the formulas, and the changes of presets that tests notice."""
    rows = (f"| {each.name} | `{each.path}` | {outcomes.get(each.name, NOT_RUN)} |\n" for each in MUTATIONS)
    changes = (f"| `{preset}` | `{change}` | {part} |\n" for preset, change, part in preset_mutations.MUTATIONS)
    return OUTCOMES_HEAD + "".join(rows) + PRESETS_HEAD + "".join(changes)


def main(parts: list[str]) -> int:
    """Run the mutations, print and keep each one's outcome, and return the exit code."""
    chosen = [each for each in MUTATIONS if not parts or any(part in each.name for part in parts)]
    missed, outcomes = 0, read_outcomes()
    for mutation in chosen:
        test = noticing_test(mutation)
        missed += not test
        outcomes[mutation.name] = f"`{test}`" if test else MISSED
        OUTCOMES.write_text(outcomes_page(outcomes), encoding="utf-8")
        print(f"{'noticed' if test else 'MISSED '}  {mutation.name} ({test or mutation.tests})", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} noticed")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
