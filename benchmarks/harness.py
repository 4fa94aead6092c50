"""Options and results of a benchmark: one small form, one folder of results, one status for "cannot run here".

Every benchmark has a `main` that reads its options with `Options`. `--small` runs all of its code in seconds, writing
of results included; its figures mean nothing. The tests run that form of every benchmark.
"""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
NOT_HERE = 77
"""Exit status if this machine lacks what the benchmark needs, as automake's tests have it."""


class Options(argparse.ArgumentParser):
    """Options of a benchmark: its own, `--small` and `--results`."""

    def __init__(self, description: str | None) -> None:
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        self._sizes: dict[str, tuple[Any, Any]] = {}
        self.add_argument("--results", type=Path, help="folder to write to (default: benchmarks/results)")
        self.add_argument(
            "--small", action="store_true", help="run all of the code in seconds, for the tests; needs --results"
        )

    def add_size(self, name: str, *, full: Any, small: Any, help: str = "", **options: Any) -> None:  # noqa: A002
        """Add an option with two defaults.

        Args:
            name: with its dashes.
            full, small: default, and default of the small form.
            help: the meaning; the defaults are added to it.
            options: more arguments of `add_argument`.
        """
        text = f"{help} (default: {_shown(full)}; small: {_shown(small)})".strip()
        added = self.add_argument(name, default=None, help=text.replace("%", "%%"), **options)
        self._sizes[added.dest] = (full, small)

    def read(self) -> argparse.Namespace:
        """Parse the command line and fill in the defaults of the form that was asked for."""
        found = self.parse_args()
        if found.small and (found.results is None or found.results.resolve() == RESULTS):
            self.error("--small: say with --results where to write (its figures mean nothing)")
        found.results = (found.results or RESULTS).resolve()
        for name, (full, small) in self._sizes.items():
            if getattr(found, name) in (None, []):  # a positional of none or more is empty when it is not given
                setattr(found, name, small if found.small else full)
        return found


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def write_results(folder: Path, name: str, lines: Sequence[str], pictures: Mapping[str, str] | None = None) -> None:
    """Write a page of results and its pictures (file name: content), and print the page.

    Everything is written at once, so call it when all of it was measured and checked.
    """
    text = "\n".join([*lines, ""])
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in {**(pictures or {}), name: text}.items():
        (folder / file).write_text(content, encoding="utf-8")
    print(text)


def start_again_with(variables: Mapping[str, str]) -> None:
    """Start this program again in its place if the environment lacks variables that libraries read on import."""
    if any(os.environ.get(name) != value for name, value in variables.items()):
        os.execve(sys.executable, sys.orig_argv, {**os.environ, **variables})


def not_here(reason: str) -> NoReturn:
    """Exit because this machine lacks what the benchmark needs; the tests skip with the reason."""
    print(f"not measured: {reason}", file=sys.stderr)
    sys.exit(NOT_HERE)
