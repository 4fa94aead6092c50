"""Small trainings on the cluster under test: rendered by Podscale, submitted and observed with the plain client."""

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
"""135 steps on two pods with a checkpoint every 20 steps, so that a disturbed run repeats some steps.

It requests the default of a quarter of a core for each process, because two cores run the whole cluster.
"""

# Prints the final weights of a run, the losses of all its steps, each counted once, and how many steps were repeated.
FINGERPRINT = """
import hashlib, json, sys
from safetensors import safe_open
digest = hashlib.sha256()
with safe_open(f"/workspace/runs/{sys.argv[1]}/model/model.safetensors", "numpy") as file:
    for name in sorted(file.keys()):
        digest.update(name.encode() + file.get_tensor(name).tobytes())
losses, events, repeated = {}, [], 0
for line in open(f"/workspace/runs/{sys.argv[1]}/metrics.jsonl"):
    record = json.loads(line)
    if record["kind"] == "step":
        repeated += record["step"] in losses
        losses[record["step"]] = record["loss"]
    if record["kind"] == "event":
        events.append(record["event"])
print(json.dumps({"weights": digest.hexdigest(), "losses": list(losses.values()), "events": events,
                  "repeated": repeated}))
"""


# Kills only the training processes, as the kernel does when memory is short; the pod remains. They are forks of the
# fork launcher, with its command line, or one process that was started as a rank.
KILL_RANKS = """
import os, pathlib, re
commands, parents = {}, {}
for process in pathlib.Path("/proc").glob("[0-9]*"):
    try:
        command, status = (process / "cmdline").read_bytes(), (process / "status").read_text()
    except OSError:  # it has just ended
        continue
    commands[int(process.name)] = command.split(b"\\0")[:4]  # further back: who starts them
    parents[int(process.name)] = int(re.search(r"PPid:\\s+(\\d+)", status)[1])
launcher = b"podscale.launch.fork_launcher"
for pid, command in commands.items():
    if b"podscale.launch.worker_main" in command or launcher in command and launcher in commands.get(parents[pid], []):
        os.kill(pid, 9)
"""


@dataclass(frozen=True)
class Result:
    """Result of a run.

    Args:
        weights: sha256 of all final tensors.
        losses: loss of every step.
        events: events of the run's log.
        repeated: number of steps that a restart repeated.
    """

    weights: str
    losses: list[float]
    events: list[str]
    repeated: int

    def same_bits(self, other: "Result") -> bool:
        return (self.weights, self.losses) == (other.weights, other.losses)


class Training:
    """One stage of a run as one kind of job."""

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
        """Return the pods of the job, by name."""
        selector = ",".join(f"{key}={value}" for key, value in self.spec.selector.items())
        return self._cluster.pods(self._namespace, selector)

    def restarts(self) -> list[int]:
        """Return how often the kubelet has restarted each pod's container."""
        return [status.restart_count for pod in self.pods() for status in pod.status.container_statuses or ()]

    def log(self, pod: int = 0) -> str:
        pods = self.pods()
        return self._cluster.logs(self._namespace, pods[pod].metadata.name) if len(pods) > pod else ""

    def conditions(self) -> dict[str, Any]:
        """Return the true conditions of the job, by type."""
        job = self._cluster.get(self._namespace, self.backend.api_version, self.backend.kind, self.spec.name)
        conditions = job.get("status", {}).get("conditions") or []
        return {condition["type"]: condition for condition in conditions if condition["status"] == "True"}

    def wait_for_step(self, number: int) -> None:
        """Wait until rank 0 has logged this step. Fails if the job ends first."""

        def reached() -> bool:
            assert not self.ended(), self.describe()
            return any(step >= number for step in steps(self.log()))

        self._cluster.wait(f"step {number} of {self.spec.name}", reached)

    def kill_ranks(self, pod: int) -> None:
        """Kill the training processes in that pod with SIGKILL."""
        name = self.pods()[pod].metadata.name
        self._cluster.execute(self._namespace, name, "python3", "-c", KILL_RANKS)

    def ended(self) -> str:
        """Return `succeeded`, `failed`, or an empty string while the job runs."""
        held = self.conditions()
        if any(name in held for name in ("Succeeded", "Complete", "Completed")):
            return "succeeded"
        return "failed" if "Failed" in held else ""

    def succeed(self, seconds: float = 600) -> None:
        """Wait for the end of the job. Fails if it is not successful."""
        self._cluster.wait(f"the end of {self.spec.name}", self.ended, seconds)
        assert self.ended() == "succeeded", self.describe()

    def result(self) -> Result:
        """Return the run's result from the workspace."""
        command = ("python3", "-c", FINGERPRINT, self.spec.run)
        return Result(**json.loads(self._cluster.run(self._namespace, self.spec.image, *command)))

    def delete(self) -> None:
        self._cluster.delete(self._namespace, self.backend.api_version, self.backend.kind, self.spec.name)

    def describe(self) -> str:
        """Return the information that a failed test shows."""
        logs = [f"--- {pod.metadata.name} {pod.status.phase}\n{self._tail(pod)}" for pod in self.pods()]
        return "\n".join([json.dumps(self.conditions(), indent=1), *logs, self._cluster.events(self._namespace)])

    def _tail(self, pod: Any) -> str:
        return self._cluster.logs(self._namespace, pod.metadata.name, tail_lines=15)


def document(image: str, run: str, *settings: str) -> RunConfig:
    """Return the document of the digits in two pods, with this run id."""
    return loads(DIGITS, "the test's document", [f"run.id={run}", f"launch.image={image}", *settings])


def steps(log: str) -> Sequence[int]:
    """Return the steps in a log of JSON lines."""
    records = [json.loads(line) for line in log.splitlines() if line.startswith("{") and line.endswith("}")]
    return [record["step"] for record in records if record.get("kind") == "step"]
