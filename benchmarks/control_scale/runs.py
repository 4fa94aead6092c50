"""Runs of the benchmark: submitted by `podscale submit` or by `kubectl create`, and launchers in processes."""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from pathlib import Path

from benchmarks.control_scale.cluster import (
    IMAGE,
    NAME,
    POD_SIZE,
    WAIT_SECONDS,
    Cluster,
    StartClock,
    jobset,
    manifest_file,
    wait,
)
from benchmarks.harness import ROOT
from podscale.config.document import dumps, load

SECONDS_PER_MINUTE = 60


@dataclass(frozen=True)
class Start:
    """Times of the start of one run, seconds from the start of the command.

    Args:
        created: Time at which the JobSet existed.
        bound: Time at which the last pod had a node.
    """

    created: float
    bound: float

    @property
    def scheduling(self) -> float:
        """Seconds from the JobSet to a node for every pod, in which only the cluster works."""
        return self.bound - self.created


@dataclass(frozen=True)
class Usage:
    """Usage of a launcher over some seconds, or since its start.

    Args:
        requests: HTTP requests.
        objects: Objects received in lists and watches.
        bytes: Bytes received.
        cpu: CPU seconds.
        mib: Resident memory at the end.
    """

    seconds: float
    requests: float
    objects: float
    bytes: float
    cpu: float
    mib: float

    @staticmethod
    def median(usages: Sequence["Usage"]) -> "Usage":
        """Return the median of each quantity over several launchers."""
        return Usage(*(statistics.median(values) for values in zip(*map(astuple, usages), strict=True)))

    @property
    def requests_a_minute(self) -> float:
        return self.requests / self.seconds * SECONDS_PER_MINUTE

    @property
    def kilobytes_a_minute(self) -> float:
        return self.bytes / 1000 / self.seconds * SECONDS_PER_MINUTE


@dataclass
class Runs:
    """Runs of a number of pods each in one namespace.

    Args:
        folder: Folder for documents.
        pods: Pods of a run.
        others: Number of runs that were created beside the measured ones.
    """

    cluster: Cluster
    namespace: str
    folder: Path
    pods: int
    others: int = 0
    _number: int = field(default=0, init=False)

    def fill(self, others: int, minutes: float) -> None:
        """Create runs until that many are beside the measured ones, and wait until all their pods run.

        Raises TimeoutError if that takes longer than `minutes`.
        """
        expected = others * self.pods
        names = [f"other-{number}" for number in range(self.others, others)]
        with ThreadPoolExecutor(4) as several:
            list(several.map(lambda name: self.cluster.create_jobset(self.namespace, jobset(name, self.pods)), names))
        self.others = others
        wait(lambda: self.ready_others() >= expected, minutes * 60, f"{expected} ready pods", 2.0)

    def ready_others(self) -> int:
        """Return the number of running pods of the other runs."""
        return self.cluster.ready_pods(self.namespace, "other-")

    def document(self, run: str, *changes: str, pods: int | None = None) -> Path:
        """Write the document of a run on GPUs and return its path."""
        nodes = pods or self.pods
        settings = [
            *(f"run.id={run}", "run.workspace=/workspace", f"launch.image={IMAGE}", "launch.backend=jobset"),
            *("launch.hardware=nvidia-h100-80gb x2", "launch.processes=2", f"launch.nodes={nodes}"),
            f"train.global_batch={2 * nodes}",
            *(f"launch.resources.cpus={POD_SIZE['cpu']}", "launch.resources.memory_gib=390"),
            "launch.resources.ephemeral_gib=100",
            f"launch.cluster={{namespace: {self.namespace}, workspace_claim: workspace,"
            f" node_selector: {{podscale.dev/benchmark: {NAME}}},"
            f" tolerations: [{{key: podscale.dev/benchmark, operator: Exists}}]}}",
        ]
        path = self.folder / f"{run}.yaml"
        path.write_text(dumps(load(None, [*settings, *changes])), encoding="utf-8")
        return path

    def submit(self, *changes: str) -> Start:
        """Start a run by `podscale submit`; delete it afterwards."""
        run = self._new_name("ours")
        document = self.document(run, *changes)
        command = [sys.executable, "-m", "podscale", "submit", str(document), "--stage=train", "--no-wait"]
        return self._timed(run, command)

    def create_by_hand(self, queue: str = "") -> Start:
        """Start a JobSet written by hand by `kubectl create`; delete it afterwards."""
        run = self._new_name("plain")
        with manifest_file(jobset(run, self.pods, queue)) as file:
            return self._timed(run, ["kubectl", "create", "--namespace", self.namespace, "--filename", file])

    def _timed(self, run: str, command: list[str]) -> Start:
        clock = StartClock(self.cluster, self.namespace, run, self.pods)
        started = time.monotonic()
        done = subprocess.run(command, env=self._environment(), capture_output=True, text=True, cwd=ROOT)
        if done.returncode:
            sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
        created, bound = clock.wait()
        self.cluster.delete_jobset(self.namespace, run)
        return Start(created - started, bound - started)

    def _new_name(self, kind: str) -> str:
        self._number += 1
        return f"{kind}-{self._number}"

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "KUBECONFIG": str(self.cluster.kubeconfig)}

    @contextmanager
    def launcher(self, run: str, *changes: str, pods: int | None = None) -> Iterator["Launcher"]:
        """Yield the launcher of a new run in another process; delete the run afterwards."""
        command = [sys.executable, "-m", "benchmarks.control_scale.launcher"]
        document = self.document(run, *changes, pods=pods)
        with (self.folder / f"{run}.log").open("w") as log:
            process = subprocess.Popen(
                [*command, str(document)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=self._environment(),
                cwd=ROOT,
            )
        try:
            yield Launcher(process, self.folder / f"{run}.log")
        finally:
            process.kill()
            process.wait()
            self.cluster.delete_jobset(self.namespace, run)


class Launcher:
    """Launcher in another process; its usage is counted between two calls of `usage`."""

    def __init__(self, process: "subprocess.Popen[str]", log: Path) -> None:
        self._process = process
        self._log = log
        self._since = time.monotonic()
        self._before = {"requests": 0, "objects": 0, "bytes": 0, "cpu": 0.0}

    def wait_for(self, text: str, seconds: float = WAIT_SECONDS) -> None:
        """Wait until the launcher has printed the text."""

        def printed() -> bool:
            if self._process.poll() is not None:
                raise RuntimeError(f"the launcher has exited: {self._log.read_text()}")
            return text in self._log.read_text()

        wait(printed, seconds, f"{text!r} in {self._log.name}: {self._log.read_text()}", poll=0.2)

    def usage(self) -> Usage:
        """Return the usage since the last call, or since the start."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        state = json.loads(self._process.stdout.readline())
        if not state["waiting"]:
            raise RuntimeError(f"the launcher does not wait: {self._log.read_text()}")
        now, before = time.monotonic(), self._before
        counts = {name: state[name] - before[name] for name in before}
        usage = Usage(seconds=now - self._since, mib=state["mib"], **counts)
        self._since, self._before = now, {name: state[name] for name in before}
        return usage
