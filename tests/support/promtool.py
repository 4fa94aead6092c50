"""The real promtool, and a rule file with the rules as they are by default."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import helm


def program() -> str:
    """promtool from the PATH or from the cluster's cache; skips the test where there is none."""
    found = shutil.which("promtool") or shutil.which("promtool", path=str(helm.cached_programs()))
    if found is None:
        pytest.skip("promtool is neither on the PATH (Debian: prometheus) nor in the cluster's cache")
    return found


def check(kind: str, path: Path) -> None:
    """`promtool check rules FILE` and the like."""
    _succeed("check", kind, path)


def test(rule_file: dict[str, Any], groups: list[dict[str, Any]], folder: Path) -> None:
    """Carries out test groups, as the documentation of `promtool test rules` has them, on a rule file.

    Groups of rules are evaluated in their order, so that alerts see what was recorded in the same minute.
    """
    (folder / "rules.yaml").write_text(yaml.safe_dump(rule_file), encoding="utf-8")
    order = [group["name"] for group in rule_file["groups"]]
    whole = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "group_eval_order": order, "tests": groups}
    (folder / "tests.yaml").write_text(yaml.safe_dump(whole), encoding="utf-8")
    _succeed("test", "rules", folder / "tests.yaml")


test.__test__ = False  # type: ignore[attr-defined]


def _succeed(*words: str | Path) -> None:
    done = subprocess.run([program(), *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
