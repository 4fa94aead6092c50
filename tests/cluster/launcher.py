"""`podscale` commands in separate processes, against the cluster under test."""

import os
import subprocess
import sys
from pathlib import Path

from podscale.config import dumps
from tests.cluster.cluster import Cluster
from tests.cluster.training import document


class Launcher:
    """Commands on one run; its document is a file, its namespace the test's."""

    def __init__(self, folder: Path, namespace: str, image: str, run: str, *settings: str) -> None:
        self.run_id = run
        self.document = folder / f"{run}.yaml"
        config = document(image, run, "launch.backend=pytorchjob", *settings)
        self.document.write_text(dumps(config), encoding="utf-8")
        self._namespace = namespace
        self._folder = folder

    def command(self, name: str, *options: str, kubeconfig: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run a command until it exits; return its exit code and output."""
        return subprocess.run(
            self._arguments(name, options), capture_output=True, text=True, timeout=840, env=_environment(kubeconfig)
        )

    def start(self, name: str, *options: str) -> "Started":
        """Start a command."""
        log = self._folder / f"{self.run_id}-{name}-{len(list(self._folder.iterdir()))}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                self._arguments(name, options), stdout=output, stderr=subprocess.STDOUT, env=_environment(None)
            )
        return Started(process, log)

    def _arguments(self, name: str, options: tuple[str, ...]) -> list[str]:
        named = [] if name == "list" else [str(self.document)]
        return [sys.executable, "-m", "podscale", name, *named, "--namespace", self._namespace, *options]


class Started:
    """Running command and its output so far."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self._log = log

    @property
    def text(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def sees(self, cluster: Cluster, *texts: str) -> None:
        """Wait until all words are printed. Fails if the command exits first."""

        def printed() -> bool:
            there = all(text in self.text for text in texts)
            assert there or self.process.poll() is None, self.text
            return there

        cluster.wait(" and ".join(texts), printed)

    def end(self) -> int:
        return self.process.wait(840)


def _environment(kubeconfig: Path | None) -> dict[str, str]:
    named = {"KUBECONFIG": str(kubeconfig)} if kubeconfig is not None else {}
    return {**os.environ, "PYTHONUNBUFFERED": "1", **named}
