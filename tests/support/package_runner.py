"""Carries out a compiled package as KFP does, without its server: each task a pod, in their order.

The graph is walked as KFP's drivers walk it: sub-graphs, loops, tasks after those they depend on, retries, conditions
of upstream success, and the exit task with the state of what went before. Where pods run is a `Host`: a cluster
(tests/cluster), or processes of this machine (tests/system/pipelines/test_package_runner.py).
"""

import re
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import yaml

from tests.support.package_pod import BUCKET, MARK, Json, Task, merged, pod

WHATEVER = "ALL_UPSTREAM_TASKS_COMPLETED"


@dataclass(frozen=True)
class PodEnd:
    """How a pod ended: the exit code of its container, or None where it vanished, and its log."""

    code: int | None
    log: str


class Host(Protocol):
    """Where pods run."""

    def run(self, manifest: Json) -> PodEnd:
        """Creates the pod, waits for its end and returns it; a pod that is deleted meanwhile vanished."""

    def kill(self, name: str) -> None:
        """Ends a pod at once, as KFP ends those of a terminated run."""


@dataclass
class TaskRun:
    """What became of a task; state as KFP says it: SUCCEEDED, FAILED, SKIPPED, and RUNNING where the run was
    terminated meanwhile."""

    state: str
    pods: list[str] = field(default_factory=list)
    log: str = ""
    outputs: dict[str, Json] = field(default_factory=dict)


@dataclass
class Scope:
    """One graph that is being carried out: its inputs, and its tasks so far."""

    parameters: Json
    path: str
    done: dict[str, TaskRun] = field(default_factory=dict)


class PackageRunner:
    """One run of a package; `tasks` has what became of each, by name, loops with the index behind it."""

    def __init__(
        self, package: str, host: Host, *, artifacts_claim: str, service_account: str, retry_seconds: float = 0.5
    ) -> None:
        documents = list(yaml.safe_load_all(package))
        self.spec: Json = documents[0]
        platforms = documents[1]["platforms"]["kubernetes"] if len(documents) > 1 else {}
        self._platforms: Json = platforms.get("deploymentSpec", {}).get("executors", {})
        self._host, self._claim, self._account = host, artifacts_claim, service_account
        self._retry_seconds = retry_seconds
        self.id = uuid.uuid4().hex[:8]
        self.tasks: dict[str, TaskRun] = {}
        self.terminated = threading.Event()

    def run(self, parameters: Json | None = None) -> str:
        """Carries out the pipeline and returns its state: SUCCEEDED or FAILED (a terminated run ends FAILED too)."""
        declared = self.spec["root"].get("inputDefinitions", {}).get("parameters", {})
        unknown = set(parameters or {}) - set(declared)
        assert not unknown, f"the pipeline has no parameter {unknown}"
        scope = Scope(_defaults(declared, parameters or {}), self.spec["pipelineInfo"]["name"])
        state = self._graph(self.spec["root"]["dag"], scope)
        return "FAILED" if self.terminated.is_set() else state

    def terminate(self) -> None:
        """Ends the run as KFP's Terminate does: pods are killed at once, no further task starts, but the exit task,
        which finds the state RUNNING."""
        self.terminated.set()
        for task in list(self.tasks.values()):
            if task.state == "RUNNING" and task.pods:
                self._host.kill(task.pods[-1])

    def wait_for(self, name: str, state: str = "RUNNING", seconds: float = 300.0) -> TaskRun:
        """The task once it is in that state with a pod."""
        deadline = time.monotonic() + seconds
        while not (name in self.tasks and self.tasks[name].state == state and self.tasks[name].pods):
            assert time.monotonic() < deadline, f"{name} is not {state}: {self.tasks}"
            time.sleep(0.05)
        return self.tasks[name]

    def _graph(self, dag: Json, scope: Scope) -> str:
        """Carries out the tasks of a graph, each after those it depends on; returns the graph's state."""
        waiting = dict(dag["tasks"])
        while waiting:
            ready = [name for name, task in waiting.items() if set(task.get("dependentTasks", ())) <= set(scope.done)]
            assert ready, f"tasks that wait for each other: {list(waiting)}"
            for name in ready:
                scope.done[name] = self._task(name, waiting.pop(name), scope)
        return _state([run for name, run in scope.done.items() if not _is_exit(dag["tasks"][name])])

    def _task(self, name: str, task: Json, scope: Scope) -> TaskRun:
        before = [scope.done[upstream].state for upstream in task.get("dependentTasks", ())]
        if not _is_exit(task) and (self.terminated.is_set() or any(state != "SUCCEEDED" for state in before)):
            return self._note(name, scope, TaskRun("SKIPPED"))
        component = self.spec["components"][task["componentRef"]["name"]]
        if "parameterIterator" in task:
            return self._loop(name, task, component, scope)
        if "dag" in component:
            inner = Scope(self._parameters(task, component, scope), f"{scope.path}/{name}")
            return TaskRun(self._graph(component["dag"], inner))
        return self._execute(name, task, component, scope)

    def _loop(self, name: str, task: Json, component: Json, scope: Scope) -> TaskRun:
        """Every iteration of a loop, so many at once as it allows."""
        iterator = task["parameterIterator"]
        items = yaml.safe_load(iterator["items"]["raw"])
        parameters = self._parameters(task, component, scope)

        def iteration(index: int) -> TaskRun:
            inner = Scope({**parameters, iterator["itemInput"]: items[index]}, f"{scope.path}/{name}.{index}")
            return TaskRun(self._graph(component["dag"], inner))

        limit = task.get("iteratorPolicy", {}).get("parallelismLimit", len(items))
        with ThreadPoolExecutor(max_workers=limit) as pool:
            return TaskRun(_state(list(pool.map(iteration, range(len(items))))))

    def _execute(self, name: str, task: Json, component: Json, scope: Scope) -> TaskRun:
        """The pods of one task: as many as its retries allow, until one succeeds."""
        label = component["executorLabel"]
        attempts = 1 + int(task.get("retryPolicy", {}).get("maxRetryCount", 0))
        run = self._note(name, scope, TaskRun("RUNNING"))
        task_pod = Task(
            name=name,
            executor=self.spec["deploymentSpec"]["executors"][label],
            component=component,
            platform=self._platforms.get(label, {}),
            root=f"{BUCKET}/{scope.path}/{self.id}/{name}",
            parameters=self._parameters(task, component, scope),
            artifacts=self._artifacts(task, scope),
        )
        for attempt in range(attempts):
            if attempt:
                time.sleep(self._retry_seconds)
            pod_name = f"{name}-{self.id}-{uuid.uuid4().hex[:4]}-{attempt}"
            run.pods.append(pod_name)
            end = self._host.run(pod(task_pod, pod_name, artifacts_claim=self._claim, service_account=self._account))
            run.log, _, metadata = end.log.partition(f"{MARK}\n")
            if end.code == 0:
                run.outputs = merged(task_pod.outputs, metadata)
                run.state = "SUCCEEDED"
                return run
            if self.terminated.is_set() and not _is_exit(task):
                return run  # its state stays RUNNING
        run.state = "FAILED"
        return run

    def _note(self, name: str, scope: Scope, run: TaskRun) -> TaskRun:
        index = re.search(r"\.(\d+)$", scope.path)
        self.tasks[f"{name}.{index[1]}" if index else name] = run
        return run

    def _parameters(self, task: Json, component: Json, scope: Scope) -> Json:
        declared = component.get("inputDefinitions", {}).get("parameters", {})
        inputs = task.get("inputs", {}).get("parameters", {})
        return _defaults(declared, {name: _value(source, scope) for name, source in inputs.items()})

    def _artifacts(self, task: Json, scope: Scope) -> dict[str, Json]:
        artifacts = {}
        for name, source in task.get("inputs", {}).get("artifacts", {}).items():
            producer = source["taskOutputArtifact"]
            artifacts[name] = scope.done[producer["producerTask"]].outputs[producer["outputArtifactKey"]]
        return artifacts


def _is_exit(task: Json) -> bool:
    return bool(task.get("triggerPolicy", {}).get("strategy") == WHATEVER)


def _state(runs: list[TaskRun]) -> str:
    states = {run.state for run in runs}
    if "RUNNING" in states:
        return "RUNNING"
    return "SUCCEEDED" if states <= {"SUCCEEDED"} else "FAILED"


def _value(source: Json, scope: Scope) -> Any:
    if "runtimeValue" in source:
        return _plain(source["runtimeValue"]["constant"])
    if "componentInputParameter" in source:
        return scope.parameters[source["componentInputParameter"]]
    producer = source["taskFinalStatus"]["producerTask"]
    return {
        "state": scope.done[producer].state,
        "pipelineTaskName": producer,
        "pipelineJobResourceName": scope.path,
        "error": {},  # what a real backend hands over
    }


def _defaults(declared: Json, values: Json) -> Json:
    defaults = {name: content["defaultValue"] for name, content in declared.items() if "defaultValue" in content}
    return {name: _plain(value) for name, value in {**defaults, **values}.items()}


def _plain(value: Any) -> Any:
    """Whole numbers as JSON of protobuf writes them."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def in_background(work: Callable[[], Any]) -> "threading.Thread":
    """A thread that carries out `work`; join it."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread
