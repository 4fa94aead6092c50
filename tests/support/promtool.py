"""Every available version of the real promtool; rules must give the same results in each."""

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
"""Locations of promtool, with the message if it is missing. Debian has Prometheus 2, the test cluster Prometheus 3."""


@dataclass(frozen=True)
class Promtool:
    """One promtool, by its path."""

    program: str

    def check(self, kind: str, path: Path) -> None:
        """Run `promtool check`, such as `promtool check rules FILE`."""
        self._succeed("check", kind, path)

    def test(self, rule_file: dict[str, Any], groups: list[dict[str, Any]], folder: Path) -> None:
        """Run test groups, in the format of `promtool test rules`, on a rule file.

        Groups of rules are evaluated in order, so that alerts see the values recorded in the same minute.
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
    """Return the path of the promtool at a location, or None."""
    if location == "PATH":
        return shutil.which("promtool")
    return os.environ.get(VARIABLE) or shutil.which("promtool", path=str(helm.cached_programs()))


def at(location: str) -> Promtool:
    """Return the promtool at a location; skip the test if there is none."""
    program = find(location)
    if program is None:
        pytest.skip(PLACES[location])
    return Promtool(program)


def anywhere() -> Promtool:
    """Return any promtool; skip the test if there is none."""
    program = next(filter(None, map(find, PLACES)), None)
    if program is None:
        pytest.skip("; ".join(PLACES.values()))
    return Promtool(program)
