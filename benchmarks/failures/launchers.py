"""Launchers of all runs of a fleet in one process: `python -m benchmarks.failures.launchers FOLDER`.

Each run document in FOLDER gets the launcher that a pipeline's task runs, in a thread. The launchers submit the jobs,
watch them, and submit a failed job again. FOLDER/results has the exit code of each launcher that has ended by itself.
A process that is killed is started again as Kubeflow Pipelines would, without the launchers that have ended.
"""

import json
import subprocess
import sys
import threading
from pathlib import Path

from podscale.config import load
from podscale.errors import PodscaleError
from podscale.stages.on_cluster import run_on_cluster
from podscale.util.files import write_json

SHARD_SET = "gs://fake/datasets/0123456789abcdef"
"""Shard set of all runs; nothing reads it."""


class LauncherProcess:
    """Process of the launchers of a folder's documents, whose log is a file of the folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._log = (folder / "launchers.log").open("ab")
        self._process = self._start()
        self.kills = 0

    def kill_and_restart(self) -> None:
        """Kill the launchers with SIGKILL, and start them again: they have to adopt their jobs."""
        self._process.kill()
        self._process.wait()
        self.kills += 1
        self._process = self._start()

    def result(self, run: str) -> int | None:
        """Return the exit code of a run's launcher; None while it waits."""
        try:
            return int(json.loads((self._folder / "results" / f"{run}.json").read_text())["exit_code"])
        except (OSError, ValueError):
            return None

    def has_ended(self, run: str) -> bool:
        return self.result(run) is not None

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()

    def _start(self) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "benchmarks.failures.launchers", str(self._folder)]
        return subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT)


def _launch(document: Path, result: Path) -> None:
    try:
        run_on_cluster(load(document), "train", SHARD_SET)
        write_json(result, {"exit_code": 0})
    except PodscaleError as error:
        print(f"{document.stem}: {error}", flush=True)
        write_json(result, {"exit_code": int(error.exit_code)})


def main(folder: Path) -> None:
    results = folder / "results"
    results.mkdir(exist_ok=True)
    documents = [path for path in sorted(folder.glob("*.yaml")) if not (results / f"{path.stem}.json").exists()]
    threads = [threading.Thread(target=_launch, args=(path, results / f"{path.stem}.json")) for path in documents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
