"""Options, results and exit status of a benchmark.

Every benchmark has a `main` that reads its options with `Options`. `--small` runs all of its code in seconds, and its
results mean nothing. The tests run this small form of every benchmark.
"""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
UNAVAILABLE = 77
"""Exit status if the benchmark cannot run on this machine, as in automake's tests."""


class Options(argparse.ArgumentParser):
    """Argument parser of a benchmark, with `--small` and `--results`."""

    def __init__(self, description: str | None) -> None:
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        self._sizes: dict[str, tuple[Any, Any]] = {}
        self.add_argument("--results", type=Path, help="folder to write to (default: benchmarks/results)")
        self.add_argument(
            "--small", action="store_true", help="run all of the code in seconds, for the tests; needs --results"
        )

    def add_size(self, name: str, *, full: Any, small: Any, help: str = "", **options: Any) -> None:  # noqa: A002
        """Add an option with two defaults; `options`: more arguments of `add_argument`."""
        text = f"{help} (default: {_format(full)}; small: {_format(small)})".strip()
        action = self.add_argument(name, default=None, help=text.replace("%", "%%"), **options)
        self._sizes[action.dest] = (full, small)

    def read(self) -> argparse.Namespace:
        """Parse the command line with the defaults of the chosen form."""
        options = self.parse_args()
        if options.small and (options.results is None or options.results.resolve() == RESULTS):
            self.error("--small: its results mean nothing. Give another folder with --results.")
        options.results = (options.results or RESULTS).resolve()
        for name, (full, small) in self._sizes.items():
            if getattr(options, name) in (None, []):  # an omitted positional with nargs="*" is empty
                setattr(options, name, small if options.small else full)
        return options


def _format(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def write_results(folder: Path, name: str, lines: Sequence[str], pictures: Mapping[str, str] | None = None) -> None:
    """Write a page of results and its pictures (file name: content), and print the page."""
    text = "\n".join([*lines, ""])
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in {**(pictures or {}), name: text}.items():
        (folder / file).write_text(content, encoding="utf-8")
    print(text)


def restart_with(variables: Mapping[str, str]) -> None:
    """Restart this program with environment variables that libraries read on import, unless they are set."""
    if any(os.environ.get(name) != value for name, value in variables.items()):
        os.execve(sys.executable, sys.orig_argv, {**os.environ, **variables})


def exit_unavailable(reason: str) -> NoReturn:
    """Exit because the benchmark cannot run on this machine; the tests skip with the reason."""
    print(f"not measured: {reason}", file=sys.stderr)
    sys.exit(UNAVAILABLE)
