"""The real promtool, of every version that is at hand: rules must mean the same to each."""

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import helm

VARIABLE = "PODSCALE_PROMTOOL"
PLACES = {
    "PATH": "promtool is not on the PATH (Debian: package prometheus)",
    "another": f"no other promtool: neither {VARIABLE} names one, nor has `make cluster-up` built one",
}
"""Where one may be, and what is said where it is not. Debian's is of Prometheus 2, the cluster's of Prometheus 3."""


@dataclass(frozen=True)
class Promtool:
    """One of them, by its path."""

    program: str

    def check(self, kind: str, path: Path) -> None:
        """`promtool check rules FILE` and the like."""
        self._succeed("check", kind, path)

    def test(self, rule_file: dict[str, Any], groups: list[dict[str, Any]], folder: Path) -> None:
        """Carries out test groups, as the documentation of `promtool test rules` has them, on a rule file.

        Groups of rules are evaluated in their order, so that alerts see what was recorded in the same minute.
        """
        (folder / "rules.yaml").write_text(yaml.safe_dump(rule_file), encoding="utf-8")
        order = [group["name"] for group in rule_file["groups"]]
        suite = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "group_eval_order": order, "tests": groups}
        (folder / "tests.yaml").write_text(yaml.safe_dump(suite), encoding="utf-8")
        self._succeed("test", "rules", folder / "tests.yaml")

    def _succeed(self, *arguments: str | Path) -> None:
        done = subprocess.run([self.program, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def find(location: str) -> str | None:
    """The path of the one in a place."""
    if location == "PATH":
        return shutil.which("promtool")
    return os.environ.get(VARIABLE) or shutil.which("promtool", path=str(helm.cached_programs()))


def at(location: str) -> Promtool:
    """The one in a place; skips the test where there is none."""
    program = find(location)
    if program is None:
        pytest.skip(PLACES[location])
    return Promtool(program)


def anywhere() -> Promtool:
    """Any; skips the test where there is none."""
    program = next(filter(None, map(find, PLACES)), None)
    if program is None:
        pytest.skip("; ".join(PLACES.values()))
    return Promtool(program)
