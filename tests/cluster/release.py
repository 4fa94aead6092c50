"""Installation of the chart on a cluster with the real Helm."""

import subprocess
from pathlib import Path
from typing import Any

from tests.support import helm

PROFILE = helm.CHART / "ci" / "cpu.yaml"


def kubectl(*arguments: str) -> str:
    done = subprocess.run(["kubectl", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def install(namespace: str, chart: Path = helm.CHART, command: str = "install", **values: Any) -> str:
    done = helm.run(command, "podscale", chart, "--namespace", namespace, "-f", PROFILE, values=values)
    assert done.returncode == 0, done.stderr
    return done.stdout


def uninstall(namespace: str) -> None:
    done = subprocess.run(
        [helm.program(), "uninstall", "podscale", "--namespace", namespace, "--wait"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
