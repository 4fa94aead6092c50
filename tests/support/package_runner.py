"""Runner of a compiled package without KFP's server: each task is a pod, in KFP's order.

It traverses the graph as KFP's drivers do: sub-graphs, loops, tasks after those they depend on, retries, conditions of
upstream success, and the exit task with the state of the others. A `Host` runs the pods: a cluster (tests/cluster), or
processes on this machine (tests/system/pipelines/test_package_runner.py).
"""

import re
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol

import yaml

from podscale.util.libyaml import SafeLoader
from tests.support.package_pod import BUCKET, MARK, Json, Task, merged, output_parameters, pod

WHATEVER = "ALL_UPSTREAM_TASKS_COMPLETED"


@dataclass(frozen=True)
class PodEnd:
    """Exit code of a pod's container (None if the pod was deleted), and its log."""

    code: int | None
    log: str


class Host(Protocol):
    """Executor of pods."""

    def run(self, manifest: Json) -> PodEnd:
        """Create the pod, wait for its end and return it; a pod that is deleted meanwhile has no exit code."""

    def kill(self, name: str) -> None:
        """Kill a pod at once, as KFP does when a run is terminated."""


@dataclass
class TaskRun:
    """Result of a task; its state is KFP's: SUCCEEDED, FAILED, SKIPPED, or RUNNING if the run was terminated."""

    state: str
    pods: list[str] = field(default_factory=list)
    log: str = ""
    outputs: dict[str, Json] = field(default_factory=dict)
    inputs: Json = field(default_factory=dict)
    """Values of the input parameters."""
    parameters: Json = field(default_factory=dict)
    """Output parameters."""
    image: str = ""
    exit_code: int | None = None
    """Exit code of the last pod."""


@dataclass
class Scope:
    """Graph in execution: its inputs, its tasks so far, and the values of KFP's placeholders."""

    parameters: Json
    path: str
    placeholders: dict[str, str] = field(default_factory=dict)
    done: dict[str, TaskRun] = field(default_factory=dict)


class PackageRunner:
    """One run of a package; `tasks` has the result of each task by name, with an index for loop iterations."""

    def __init__(
        self,
        package: str,
        host: Host,
        *,
        artifacts_claim: str,
        service_account: str,
        retry_seconds: float = 0.5,
        scheduled: str = "",
    ) -> None:
        documents = list(yaml.load_all(package, Loader=SafeLoader))
        self.spec: Json = documents[0]
        platforms = documents[1]["platforms"]["kubernetes"] if len(documents) > 1 else {}
        self._platforms: Json = platforms.get("deploymentSpec", {}).get("executors", {})
        self._host, self._claim, self._account = host, artifacts_claim, service_account
        self._retry_seconds = retry_seconds
        self.id = str(uuid.uuid4())
        created = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        self.placeholders = {
            "{{$.pipeline_job_uuid}}": self.id,
            "{{$.pipeline_job_create_time_utc}}": created,
            "{{$.pipeline_job_schedule_time_utc}}": scheduled or created,
        }
        self.tasks: dict[str, TaskRun] = {}
        self.terminated = threading.Event()
        self._skip_exit_task = False

    def run(self, parameters: Json | None = None) -> str:
        """Run the pipeline and return its state: SUCCEEDED or FAILED (also if it was terminated)."""
        declared = self.spec["root"].get("inputDefinitions", {}).get("parameters", {})
        unknown = set(parameters or {}) - set(declared)
        assert not unknown, f"the pipeline has no parameter {unknown}"
        name = self.spec["pipelineInfo"]["name"]
        scope = Scope(_defaults(declared, parameters or {}), name, self.placeholders)
        state = self._graph(self.spec["root"]["dag"], scope)
        return "FAILED" if self.terminated.is_set() else state

    def terminate(self, *, exit_task: bool = True) -> None:
        """Terminate the run as KFP does: kill all pods, and start no further task except the exit task.

        The exit task gets the state RUNNING. With KFP's default retry strategy it does not run (`exit_task` False).
        """
        self._skip_exit_task = not exit_task
        self.terminated.set()
        for task in list(self.tasks.values()):
            if task.state == "RUNNING" and task.pods:
                self._host.kill(task.pods[-1])

    def wait_for(self, name: str, state: str = "RUNNING", seconds: float = 300.0) -> TaskRun:
        """Wait until the task is in that state with a pod, and return it."""
        deadline = time.monotonic() + seconds
        while not (name in self.tasks and self.tasks[name].state == state and self.tasks[name].pods):
            assert time.monotonic() < deadline, f"{name} is not {state}: {self.tasks}"
            time.sleep(0.05)
        return self.tasks[name]

    def _graph(self, dag: Json, scope: Scope) -> str:
        """Run the tasks of a graph, each after those it depends on; return the graph's state."""
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
        if _is_exit(task) and self._skip_exit_task:
            return self._note(name, scope, TaskRun("SKIPPED"))
        component = self.spec["components"][task["componentRef"]["name"]]
        if "parameterIterator" in task:
            return self._loop(name, task, component, scope)
        if "dag" in component:
            inner = Scope(self._parameters(task, component, scope), f"{scope.path}/{name}", scope.placeholders)
            return TaskRun(self._graph(component["dag"], inner))
        return self._execute(name, task, component, scope)

    def _loop(self, name: str, task: Json, component: Json, scope: Scope) -> TaskRun:
        """Run every iteration of a loop, as many in parallel as it allows."""
        iterator = task["parameterIterator"]
        items = yaml.safe_load(iterator["items"]["raw"])
        parameters = self._parameters(task, component, scope)

        def iteration(index: int) -> TaskRun:
            values = {**parameters, iterator["itemInput"]: items[index]}
            inner = Scope(values, f"{scope.path}/{name}.{index}", scope.placeholders)
            return TaskRun(self._graph(component["dag"], inner))

        limit = task.get("iteratorPolicy", {}).get("parallelismLimit", len(items))
        with ThreadPoolExecutor(max_workers=limit) as pool:
            return TaskRun(_state(list(pool.map(iteration, range(len(items))))))

    def _execute(self, name: str, task: Json, component: Json, scope: Scope) -> TaskRun:
        """Run the pods of one task, as many as its retries allow, until one succeeds."""
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
        run.inputs, run.image = task_pod.parameters, task_pod.image
        for attempt in range(attempts):
            if attempt:
                time.sleep(self._retry_seconds)
            # differs from other attempts in its last part
            pod_name = f"{name}-{self.id[:8]}-{uuid.uuid4().hex[:4]}{attempt}"
            run.pods.append(pod_name)
            end = self._host.run(pod(task_pod, pod_name, artifacts_claim=self._claim, service_account=self._account))
            run.log, _, metadata = end.log.partition(f"{MARK}\n")
            run.exit_code = end.code
            if end.code == 0:
                run.outputs = merged(task_pod.outputs, metadata)
                run.parameters = output_parameters(metadata)
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
    if "runtimeValue" in source:  # a placeholder is filled in only if it is the whole value (driver: resolve.go)
        constant = source["runtimeValue"]["constant"]
        return scope.placeholders.get(constant, constant) if isinstance(constant, str) else _plain(constant)
    if "componentInputParameter" in source:
        return scope.parameters[source["componentInputParameter"]]
    if output := source.get("taskOutputParameter"):
        return scope.done[output["producerTask"]].parameters[output["outputParameterKey"]]
    producer = source["taskFinalStatus"]["producerTask"]
    return {
        "state": scope.done[producer].state,
        "pipelineTaskName": producer,
        "pipelineJobResourceName": scope.path,
        "error": {},  # as a real backend passes it
    }


def _defaults(declared: Json, values: Json) -> Json:
    defaults = {name: content["defaultValue"] for name, content in declared.items() if "defaultValue" in content}
    return {name: _plain(value) for name, value in {**defaults, **values}.items()}


def _plain(value: Any) -> Any:
    """Convert whole floats to integers, as protobuf's JSON writes numbers."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def in_background(work: Callable[[], Any]) -> "threading.Thread":
    """Start a thread that runs `work`; the caller joins it."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread
