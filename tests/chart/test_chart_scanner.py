"""checks of checkov that the rendered chart fails are exactly those accepted in charts/podscale/.checkov.yaml."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import helm

PINNED = f"sha256:{'0' * 64}"
VALUES: dict[str, Any] = helm.EVERYTHING | {
    # Values of a strict installation: images by digest, always pulled.
    "images": {name: f"podscale-{name}@{PINNED}" for name in ("train", "launcher", "test")} | {"pullPolicy": "Always"}
}


def checkov() -> str:
    program = os.environ.get("PODSCALE_CHECKOV") or shutil.which("checkov")
    if program is None:
        pytest.skip("checkov is not on the PATH; install it in a separate environment and set PODSCALE_CHECKOV to it")
    return program


def failed_checks(objects: list[dict[str, Any]], folder: Path, *more: str | Path) -> set[tuple[str, str]]:
    """Return each check that fails, and its object."""
    target = folder / "chart.yaml"
    target.write_text(yaml.safe_dump_all(objects), encoding="utf-8")
    command = [checkov(), "--skip-download", "--framework", "kubernetes", "-o", "json", "-f", str(target)]
    done = subprocess.run([*command, *map(str, more)], capture_output=True, text=True, check=False)
    failed = json.loads(done.stdout)["results"]["failed_checks"]
    return {(check["check_id"], check["resource"]) for check in failed}


def test_nothing_is_found(tmp_path: Path) -> None:
    assert not failed_checks(helm.template(None, VALUES), tmp_path, "--config-file", helm.CHART / ".checkov.yaml")


def test_every_exception_is_still_needed(tmp_path: Path) -> None:
    excused = yaml.safe_load((helm.CHART / ".checkov.yaml").read_text(encoding="utf-8"))["skip-check"]
    assert {check for check, _ in failed_checks(helm.template(None, VALUES), tmp_path)} == set(excused)
