"""Small trainings on a cluster under test: rendered by Podscale, submitted as anybody would, looked at from outside."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from podscale.config import RunConfig
from podscale.config.document import loads
from podscale.kubernetes.job_spec import build_job_spec
from podscale.kubernetes.render import render_job
from podscale.kubernetes.resources import JOB_KINDS
from podscale.runs.stage_outcomes import StageName
from tests.cluster.cluster import Cluster
from tests.support.tiny import TINY

DIGITS = (
    TINY
    + """
run: {id: calm, workspace: /workspace, seed: 1}
train: {epochs: 6, global_batch: 64, schedule: {learning_rate: 0.1, warmup_epochs: 1}}
evaluate: {crop_fraction: 1.0, every_epochs: 0}
checkpoint: {every_epochs: 0, every_steps: 20}
telemetry: {log_every: 1, log: json}
launch:
  nodes: 2
  processes: 1
  threads: 1
  grace_seconds: 30
  timeout_seconds: 60
  resources: {memory_gib: 1.5, shm_gib: 0.25, ephemeral_gib: 1}
  cluster: {workspace_claim: workspace, image_pull_policy: IfNotPresent}
"""
)
"""135 steps on two pods, a checkpoint every 20, so that a disturbed run has work to do again. No CPU is asked for:
two cores carry the whole cluster."""

# What a run ends with: its final weights, and the losses of all its updates, each step counted once.
FINGERPRINT = """
import hashlib, json, sys
from safetensors import safe_open
digest = hashlib.sha256()
with safe_open(f"/workspace/runs/{sys.argv[1]}/model/model.safetensors", "numpy") as file:
    for name in sorted(file.keys()):
        digest.update(name.encode() + file.get_tensor(name).tobytes())
losses, events = {}, []
for line in open(f"/workspace/runs/{sys.argv[1]}/metrics.jsonl"):
    record = json.loads(line)
    if record["kind"] == "step":
        losses[record["step"]] = record["loss"]
    if record["kind"] == "event":
        events.append(record["event"])
print(json.dumps({"weights": digest.hexdigest(), "losses": list(losses.values()), "events": events}))
"""


# The processes that train, and they alone, as the kernel takes a process when memory is short; the pod stays. They are
# copies of the spawner, with its words, or one process that was started as a rank.
KILL_RANKS = """
import os, pathlib, re
words, parents = {}, {}
for place in pathlib.Path("/proc").glob("[0-9]*"):
    try:
        told, status = (place / "cmdline").read_bytes(), (place / "status").read_text()
    except OSError:  # it has just ended
        continue
    words[int(place.name)] = told.split(b"\\0")[:4]  # further back: who starts them
    parents[int(place.name)] = int(re.search(r"PPid:\\s+(\\d+)", status)[1])
spawned = b"podscale.launch.fork_launcher"
for pid, own in words.items():
    if b"podscale.launch.worker_main" in own or spawned in own and spawned in words.get(parents[pid], []):
        os.kill(pid, 9)
"""


@dataclass(frozen=True)
class Result:
    """weights: sha256 of all final tensors; losses: of every step; events: what the run's log tells."""

    weights: str
    losses: list[float]
    events: list[str]

    def same_bits(self, other: "Result") -> bool:
        return (self.weights, self.losses) == (other.weights, other.losses)


class Training:
    """One stage of one run as a job of one kind."""

    def __init__(
        self,
        cluster: Cluster,
        namespace: str,
        image: str,
        run: str,
        backend: str,
        *settings: str,
        stage: StageName = "train",
    ) -> None:
        self.config = document(image, run, *settings)
        self.spec = build_job_spec(self.config, stage)
        self.backend = JOB_KINDS[backend]
        self._cluster, self._namespace = cluster, namespace
        manifests = render_job(self.spec, backend)
        for manifest in (*manifests.owned_objects, manifests.job):
            cluster.create(namespace, manifest)

    def pods(self) -> list[Any]:
        """The pods of the job, by name."""
        selector = ",".join(f"{key}={value}" for key, value in self.spec.selector.items())
        return self._cluster.pods(self._namespace, selector)

    def restarts(self) -> list[int]:
        """How often the kubelet has started each pod's container again."""
        return [status.restart_count for pod in self.pods() for status in pod.status.container_statuses or ()]

    def log(self, pod: int = 0) -> str:
        pods = self.pods()
        return self._cluster.logs(self._namespace, pods[pod].metadata.name) if len(pods) > pod else ""

    def conditions(self) -> dict[str, Any]:
        """The conditions of the job that hold, by type."""
        job = self._cluster.get(self._namespace, self.backend.api_version, self.backend.kind, self.spec.name)
        conditions = job.get("status", {}).get("conditions") or []
        return {condition["type"]: condition for condition in conditions if condition["status"] == "True"}

    def wait_for_update(self, number: int) -> None:
        """Returns once rank 0 has logged this update; fails if the job ends first."""

        def reached() -> bool:
            assert not self.ended(), self.describe()
            return any(step >= number for step in steps(self.log()))

        self._cluster.wait(f"step {number} of {self.spec.name}", reached)

    def kill_ranks(self, pod: int) -> None:
        """kill -9 of the processes that train in that pod."""
        name = self.pods()[pod].metadata.name
        self._cluster.execute(self._namespace, name, "python3", "-c", KILL_RANKS)

    def ended(self) -> str:
        """succeeded, failed, or empty as long as it runs."""
        held = self.conditions()
        if any(name in held for name in ("Succeeded", "Complete", "Completed")):
            return "succeeded"
        return "failed" if "Failed" in held else ""

    def succeed(self, seconds: float = 600) -> None:
        """Waits for the end, which must be a success."""
        self._cluster.wait(f"the end of {self.spec.name}", self.ended, seconds)
        assert self.ended() == "succeeded", self.describe()

    def result(self) -> Result:
        """What the run left in the workspace."""
        command = ("python3", "-c", FINGERPRINT, self.spec.run)
        return Result(**json.loads(self._cluster.run(self._namespace, self.spec.image, *command)))

    def delete(self) -> None:
        self._cluster.delete(self._namespace, self.backend.api_version, self.backend.kind, self.spec.name)

    def describe(self) -> str:
        """All that a failed test should show."""
        logs = [f"--- {pod.metadata.name} {pod.status.phase}\n{self._tail(pod)}" for pod in self.pods()]
        return "\n".join([json.dumps(self.conditions(), indent=1), *logs, self._cluster.events(self._namespace)])

    def _tail(self, pod: Any) -> str:
        return self._cluster.logs(self._namespace, pod.metadata.name, tail_lines=15)


def document(image: str, run: str, *settings: str) -> RunConfig:
    """The digits in two pods, under this id."""
    return loads(DIGITS, "the test's document", [f"run.id={run}", f"launch.image={image}", *settings])


def steps(log: str) -> Sequence[int]:
    """The updates that a log in JSON lines tells of."""
    records = [json.loads(line) for line in log.splitlines() if line.startswith("{") and line.endswith("}")]
    return [record["step"] for record in records if record.get("kind") == "step"]
