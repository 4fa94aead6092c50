"""Training operator and kubelet for one-pod PyTorchJobs of a FakeCluster: their pods are processes of this machine.

It runs the command and the variables of the rendered manifest, restarts a container that fails (OnFailure), stops the
pods of a deleted job by SIGTERM, and sets the status of pods and jobs.
"""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.cluster_objects import condition, pod
from tests.support.commands import MARK
from tests.support.fake_cluster import FakeCluster
from tests.support.fake_state import Object, now

POLL_SECONDS = 0.05
RESTART_SECONDS = 0.5
"""Pause of the kubelet before a restart, seconds."""


@dataclass
class LocalPod:
    """One pod: its starts, their exit codes, and the running process."""

    job: Object
    folder: Path
    exit_codes: list[int] = field(default_factory=list)
    process: subprocess.Popen[bytes] | None = None
    restart_at: float = 0.0

    @property
    def uid(self) -> str:
        return str(self.job["metadata"]["uid"])

    @property
    def message(self) -> str:
        """Termination message of the last start."""
        path = self.folder / f"message-{len(self.exit_codes) - 1}"
        return path.read_text() if path.exists() else ""

    def start(self, processes: int, more: Mapping[str, str]) -> None:
        (container,) = self.job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
        number = len(self.exit_codes)
        fields = {"PET_NODE_RANK": "0"}
        variables = {entry["name"]: entry.get("value", fields.get(entry["name"], "")) for entry in container["env"]}
        variables |= {
            "PET_NNODES": "1",
            "PET_NPROC_PER_NODE": str(processes),
            "PET_MASTER_ADDR": "127.0.0.1",
            "PODSCALE_TERMINATION_LOG": str(self.folder / f"message-{number}"),
            "KUBERNETES_SERVICE_HOST": "127.0.0.1",
            "TMPDIR": str(self.folder),
            MARK: str(self.folder),
            **more,
        }
        with (self.folder / f"log-{number}").open("wb") as log:
            command = [sys.executable, "-m", *container["command"]]
            self.process = subprocess.Popen(
                command, env={**os.environ, **variables}, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def logs(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("log-*")))


class LocalOperator:
    """Runs the jobs of a cluster until closed; `pods` has one entry for each job, the oldest first.

    Args:
        processes: Ranks of each pod.
        variables: Further variables of the pods.
    """

    def __init__(self, cluster: FakeCluster, folder: Path, processes: int, variables: Mapping[str, str]) -> None:
        self._cluster, self._folder, self._processes, self._variables = cluster, folder, processes, variables
        self.pods: list[LocalPod] = []
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
        for local in self.pods:
            if local.process is not None and local.process.poll() is None:
                local.process.kill()
                local.process.wait()

    def _run(self) -> None:
        while not self._closed.wait(POLL_SECONDS):
            jobs = {job["metadata"]["uid"]: job for job in self._cluster.all("pytorchjobs")}
            known = {local.uid for local in self.pods}
            for uid, job in jobs.items():
                if uid not in known:
                    folder = self._folder / f"pod-{len(self.pods)}"
                    folder.mkdir(parents=True)
                    self.pods.append(LocalPod(job, folder))
                    self.pods[-1].start(self._processes, self._variables)
                    self._show(self.pods[-1])
            for local in self.pods:
                self._attend(local, is_deleted=local.uid not in jobs)

    def _attend(self, local: LocalPod, *, is_deleted: bool) -> None:
        if local.process is None:
            if local.restart_at and time.monotonic() >= local.restart_at and not is_deleted:
                local.restart_at = 0.0
                local.start(self._processes, self._variables)
                self._show(local)
            return
        code = local.process.poll()
        if code is None:
            if is_deleted and not (local.folder / "stopped").exists():
                (local.folder / "stopped").touch()
                local.process.terminate()
            return
        local.exit_codes.append(code)
        local.process = None
        if not is_deleted:
            local.restart_at = time.monotonic() + RESTART_SECONDS if code else 0.0
            self._show(local)

    def _show(self, local: LocalPod) -> None:
        """Set the status of a pod, and of its job when the pod has succeeded."""
        name, restarts = str(local.job["metadata"]["name"]), len(local.exit_codes)
        owner = {"kind": "PyTorchJob", "name": name, "uid": local.uid, "controller": True}
        ended: Object = {}
        if local.exit_codes:
            state = {"exitCode": local.exit_codes[-1], "reason": "Completed", "message": local.message}
            ended = {"terminated": {**state, "finishedAt": now()}}
        running = local.process is not None
        has_succeeded = not running and local.exit_codes[-1] == 0
        shown = pod(
            name=f"{name}-worker-0",
            uid=f"{local.uid}-0",
            restarts=restarts,
            state={"running": {"startedAt": now()}} if running else ended,
            last=ended if running else {},
            phase="Succeeded" if has_succeeded else "Running",
        )
        shown["metadata"] |= {"labels": local.job["metadata"]["labels"], "ownerReferences": [owner]}
        self._cluster.put("pods", shown)
        self._cluster.say(f"{name}-worker-0", f"start {restarts}")
        current = self._cluster.get("pytorchjobs", name)
        if current is None or current["metadata"]["uid"] != local.uid:
            return
        if has_succeeded:
            self._cluster.hang_up(f"{name}-worker-0")
        status = {"conditions": [condition("Succeeded" if has_succeeded else "Running")]}
        self._cluster.put("pytorchjobs", {**current, "status": status})


@contextmanager
def operating(
    cluster: FakeCluster, folder: Path, processes: int, variables: Mapping[str, str]
) -> Iterator[LocalOperator]:
    operator = LocalOperator(cluster, folder, processes, variables)
    try:
        yield operator
    finally:
        operator.close()
