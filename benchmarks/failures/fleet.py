"""Fleet of runs on the simulated cluster: real jobs on fake nodes, trainings that are simulated between the failures.

Time passes in two ways. While a training runs, its virtual clock jumps: 72 hours take no time. From a failure until all
pods of the run are there again, everything is real: API server, operator, scheduler, launcher. Those seconds count one
to one, and the modelled times to notice the failure and to start the processes are added.
"""

import functools
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from kubernetes import client

from benchmarks.failures.fake_nodes import NODE_CPUS, NODE_LABEL, NODE_MEMORY_GIB, FakeNodes
from benchmarks.failures.fleet_watch import FleetWatch, Pod
from benchmarks.failures.launchers import SHARD_SET, LauncherProcess
from benchmarks.failures.model import FakeRun, failure_times
from benchmarks.failures.simulation import FleetResult, Simulation
from podscale.config import RunConfig, dumps, loads
from podscale.runs import RunDirectory, StageOutcome, stage_outcomes, write_outcome
from podscale.telemetry.goodput import read_goodput_state, write_goodput_state

START_TIMEOUT, RECOVERY_TIMEOUT = 600.0, 600.0
"""Timeouts on a busy machine for the first pods, and for the recovery from a failure, seconds."""
STABLE_SECONDS = 2.0
"""Time for which all pods run before a recovery counts as done, seconds; not part of the recovery."""
KILL_EVERY = 4
"""Failures between two kills of the launchers."""


@dataclass(frozen=True)
class FleetSpec:
    """Equal runs.

    Args:
        backend: Kind of their jobs, as in launch.backend.
        run: The modelled run; its `replace_seconds` is the modelled part of a replacement.
        runs: Number of runs.
        pods: Pods of a run; each stands for `run.nodes / pods` nodes and fails that much more often than one.
        hours: Simulated time after which a run is expected to have done its steps.
        restarts: launch.cluster.restarts, after which the operator fails the job and the launcher submits it again.
    """

    backend: str
    run: FakeRun
    runs: int
    pods: int
    hours: float
    restarts: int = 10

    def document(self, namespace: str, workspace: Path, number: int) -> RunConfig:
        """Return the run document of a run."""
        cluster = {
            "namespace": namespace,
            "workspace_claim": "workspace",
            "node_selector": {NODE_LABEL: namespace},
            "tolerations": [{"key": NODE_LABEL, "operator": "Exists"}],
            "restarts": self.restarts,
        }
        launch = {
            "backend": self.backend,
            "nodes": self.pods,
            "processes": 1,
            "retries": 20,
            "resources": {"cpus": NODE_CPUS, "memory_gib": NODE_MEMORY_GIB},
            "cluster": cluster,
        }
        run_id = f"fleet-{self.backend}-{number}"
        values = {"run": {"id": run_id, "workspace": str(workspace)}, "data": {"source": "digits"}, "launch": launch}
        return loads(json.dumps(values), run_id, [f"train.global_batch={self.pods * 8}"])


@dataclass
class FleetRun:
    """One run: its document, its simulated training and the times of its failures."""

    config: RunConfig
    simulation: Simulation
    failures: Iterator[float]
    next_failure: float = 0.0
    recoveries: list[float] = field(default_factory=list)
    """Real seconds of each recovery."""

    @property
    def id(self) -> str:
        return self.config.run.id

    @property
    def directory(self) -> RunDirectory:
        return RunDirectory.for_config(self.config)

    def write_state(self) -> None:
        """Write the goodput file as the pods do."""
        write_goodput_state(self.directory.goodput, self.simulation.state())

    def write_results(self) -> None:
        """Write what a finished training leaves in the run directory, for the launcher."""
        self.directory.model.mkdir(exist_ok=True)
        for name in ("model.safetensors", "model.json"):
            (self.directory.model / name).touch()
        stage_outcomes.record_finished(self.config, "train", SHARD_SET)
        write_outcome(self.directory.outcome, StageOutcome("train", 0, "", self.simulation.clock.now, ""))


@dataclass(frozen=True)
class ClusterResult:
    """Result of a fleet on the cluster.

    Args:
        fleet: Goodput of all runs, with the mean time of a replacement as it was.
        succeeded: Number of runs whose launcher returned 0.
        jobs: Number of jobs that existed.
        pods: Number of pods that existed.
        launcher_kills: Number of kills of the launchers.
        violations: Broken rules.
        real_seconds: Mean real time of a recovery, and the longest.
        wall_seconds: Real time of the whole fleet.
    """

    spec: FleetSpec
    fleet: FleetResult
    succeeded: int
    jobs: int
    pods: int
    launcher_kills: int
    violations: Sequence[str]
    real_seconds: tuple[float, float]
    wall_seconds: float


class Fleet:
    """Runs of a FleetSpec on a cluster with kwok; `run` takes them from submission to the end."""

    def __init__(self, api: client.ApiClient, namespace: str, spec: FleetSpec, folder: Path, seed: int = 0) -> None:
        self._spec, self._folder, self._random = spec, folder, random.Random(seed)
        self._watch = FleetWatch(api, namespace)
        self._nodes = FakeNodes(client.CoreV1Api(api), namespace, spec.runs * spec.pods + spec.pods // 8 + 2)
        steps = spec.run.steps_in(spec.hours)
        self.runs = []
        for number in range(spec.runs):
            times = failure_times(spec.run.failures_per_second, random.Random(f"{seed} {number}"))
            config = spec.document(namespace, folder / "workspace", number)
            self.runs.append(FleetRun(config, Simulation(spec.run, steps=steps), times, next(times)))
        self._injected = 0

    def run(self) -> ClusterResult:
        """Run the fleet. Raises TimeoutError if a job does not come back."""
        began = time.monotonic()
        for run in self.runs:
            (self._folder / f"{run.id}.yaml").write_text(dumps(run.config), encoding="utf-8")
        with self._nodes.running():
            launchers = LauncherProcess(self._folder)
            try:
                for run in self.runs:
                    self._wait_for_pods(run, START_TIMEOUT)
                unfinished = list(self.runs)
                while unfinished:
                    run = min(unfinished, key=lambda one: one.next_failure)
                    if run.simulation.launch(run.next_failure):
                        self._finish(run)
                        unfinished.remove(run)
                    else:
                        run.write_state()
                        self._recover(run, launchers)
                for run in self.runs:
                    ended = functools.partial(launchers.has_ended, run.id)
                    self._watch.wait(f"the launcher of {run.id}", ended, RECOVERY_TIMEOUT)
            finally:
                launchers.close()
                self._watch.close()
        return self._result(launchers, time.monotonic() - began)

    def _recover(self, run: FleetRun, launchers: LauncherProcess) -> None:
        """Fail a node of a run, and wait for its pods; also those nodes that fail while it waits."""
        while True:
            failed_at, simulation = run.next_failure, run.simulation
            simulation.failures += 1
            seconds = self._fail_node(run, launchers)
            run.recoveries.append(seconds)
            ready = failed_at + self._spec.run.replace_seconds + seconds
            run.next_failure = next(run.failures)
            if run.next_failure >= ready:
                simulation.clock.now = ready
                return

    def _fail_node(self, run: FleetRun, launchers: LauncherProcess) -> float:
        """Fail the node of one pod; return the seconds until all pods run again."""
        pods = self._wait_for_pods(run, RECOVERY_TIMEOUT, stable_seconds=0.0)
        lost = self._random.choice(pods)
        began = time.monotonic()
        self._injected += 1
        if self._injected % KILL_EVERY == 0:
            launchers.kill_and_restart()
        self._nodes.fail(lost)
        if self._spec.backend == "pytorchjob":
            self._nodes.restart_containers(pod for pod in pods if pod is not lost)
        self._wait_for_pods(run, RECOVERY_TIMEOUT, without=lost)
        return time.monotonic() - began - STABLE_SECONDS

    def _finish(self, run: FleetRun) -> None:
        """End the pods of a run that has done its steps, and wait for its job."""
        run.write_state()
        run.write_results()
        self._nodes.complete(self._wait_for_pods(run, RECOVERY_TIMEOUT))
        self._watch.wait(f"success of {run.id}", lambda: self._watch.job_succeeded(run.id), RECOVERY_TIMEOUT)

    def _wait_for_pods(
        self, run: FleetRun, timeout: float, *, without: Pod | None = None, stable_seconds: float = STABLE_SECONDS
    ) -> list[Pod]:
        """Return the pods of a run once all have run for `stable_seconds`; `without` is gone then."""
        stable_since, uids = 0.0, set[str]()

        def complete() -> list[Pod]:
            nonlocal stable_since, uids
            pods = self._watch.training_set(run.id, self._spec.pods)
            now, found = time.monotonic(), {pod.metadata.uid for pod in pods}
            if found != uids or (without is not None and without.metadata.uid in found):
                stable_since, uids = now, found
            return pods if uids and now - stable_since >= stable_seconds else []

        pods: list[Pod] = self._watch.wait(f"{self._spec.pods} pods of {run.id}", complete, timeout)
        return pods

    def _result(self, launchers: LauncherProcess, wall_seconds: float) -> ClusterResult:
        recoveries = [seconds for run in self.runs for seconds in run.recoveries] or [0.0]
        mean = sum(recoveries) / len(recoveries)
        measured = replace(self._spec.run, replace_seconds=self._spec.run.replace_seconds + mean)
        states = tuple(filter(None, (read_goodput_state(run.directory.goodput) for run in self.runs)))
        failures = sum(run.simulation.failures for run in self.runs)
        violations = [*self._watch.violations, *(line for run in self.runs for line in step_violations(run))]
        return ClusterResult(
            self._spec,
            FleetResult(measured, states, failures),
            succeeded=sum(launchers.result(run.id) == 0 for run in self.runs),
            jobs=sum(len(self._watch.jobs[run.id]) for run in self.runs),
            pods=len(self._watch.pods),
            launcher_kills=launchers.kills,
            violations=violations,
            real_seconds=(mean, max(recoveries)),
            wall_seconds=wall_seconds,
        )


def step_violations(run: FleetRun) -> Iterator[str]:
    """Yield what is wrong with the steps of a run: each must be counted once, and none may be missing."""
    state = read_goodput_state(run.directory.goodput)
    launches, steps = run.simulation.launches, run.simulation.steps
    if state is None or state.exit_cause != "done" or state.step != steps or state.highest_step != steps:
        yield f"{run.id}: the accounting does not end with step {steps}"
        return
    done = 0
    for first, last in launches:
        if first > done:
            yield f"{run.id}: steps {done + 1} to {first} are missing"
        done = max(done, last)
    executed = sum(last - first for first, last in launches)
    if executed - state.redone_steps != steps:
        yield f"{run.id}: {executed} steps, {state.redone_steps} of them repeated, are not {steps}"
