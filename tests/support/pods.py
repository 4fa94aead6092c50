"""Pods of a rendered job, read from the manifest as its operator does."""

from dataclasses import dataclass
from typing import Any

from podscale.kubernetes.render import JobManifests


@dataclass(frozen=True)
class Pods:
    """Pods of a job, all equal: their number, ranks in each (None if the pod decides), metadata and spec."""

    count: int
    processes: int | None
    metadata: dict[str, Any]
    spec: dict[str, Any]

    @property
    def container(self) -> dict[str, Any]:
        (container,) = self.spec["containers"]
        return container

    @property
    def environment(self) -> dict[str, Any]:
        """Environment by name; the value of a variable from a field is the field's path."""
        variables = {}
        for entry in self.container["env"]:
            assert entry["name"] not in variables, f"{entry['name']} is set twice"
            read = entry["value"] if "value" in entry else entry["valueFrom"]["fieldRef"]["fieldPath"]
            variables[entry["name"]] = read
        return variables


def pods_of(manifests: JobManifests) -> Pods:
    """Return the pods of the job."""
    job = manifests.job
    return READERS[job["kind"]](manifests)


def _replicas(manifests: JobManifests, field: str) -> Pods:
    spec = manifests.job["spec"]
    (worker,) = spec[field].values()
    processes = int(spec["nprocPerNode"]) if "nprocPerNode" in spec else None
    return Pods(worker["replicas"], processes, worker["template"]["metadata"], worker["template"]["spec"])


def _set(spec: dict[str, Any], pods: int | None, processes: int | None) -> Pods:
    (replicated,) = spec["replicatedJobs"]
    job = replicated["template"]["spec"]
    count = pods if pods is not None else replicated["replicas"] * job["completions"]
    assert pods is not None or job["completions"] == job["parallelism"]
    return Pods(count, processes, job["template"]["metadata"], job["template"]["spec"])


def _jobset(manifests: JobManifests) -> Pods:
    workers = _set(manifests.job["spec"], None, None)
    return Pods(workers.count, int(workers.environment["PET_NPROC_PER_NODE"]), workers.metadata, workers.spec)


def _trainjob(manifests: JobManifests) -> Pods:
    """Return the pods as Trainer creates them: the runtime's template, then the trainer's fields, then the patches."""
    job = manifests.job["spec"]
    (runtime,) = (one for one in manifests.owned_objects if one["kind"] == "TrainingRuntime")
    assert job["runtimeRef"]["name"] == runtime["metadata"]["name"]
    trainer = job["trainer"]
    workers = _set(runtime["spec"]["template"]["spec"], trainer["numNodes"], trainer["numProcPerNode"])
    spec = dict(workers.spec)
    for patch in job["runtimePatches"]:
        (replicated,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
        spec |= replicated["template"]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    spec["containers"] = [
        {
            **container,
            "image": trainer["image"],
            "command": trainer["command"],
            "env": trainer["env"],
            "resources": trainer["resourcesPerNode"],
        }
    ]
    return Pods(workers.count, workers.processes, workers.metadata, spec)


def _job(manifests: JobManifests) -> Pods:
    spec = manifests.job["spec"]
    return Pods(spec["completions"], None, spec["template"]["metadata"], spec["template"]["spec"])


READERS = {
    "PyTorchJob": lambda manifests: _replicas(manifests, "pytorchReplicaSpecs"),
    "JAXJob": lambda manifests: _replicas(manifests, "jaxReplicaSpecs"),
    "JobSet": _jobset,
    "TrainJob": _trainjob,
    "Job": _job,
}
