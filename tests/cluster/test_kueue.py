"""Kueue admits jobs by quota, preempts them by priority, and requests nodes for them.

A preempted training saves, and resumes to the bits of an undisturbed run.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.launcher import Launcher
from tests.cluster.training import Training
from tests.support import helm

pytestmark = [pytest.mark.timeout(1800), pytest.mark.cluster_full("kueue.x-k8s.io")]
API = "kueue.x-k8s.io/v1beta2"
DELETION_ORDER = ("LocalQueue", "ClusterQueue", "ResourceFlavor", "AdmissionCheck", "ProvisioningRequestConfig")
"""Kueue keeps what a queue still uses."""
AUTOSCALER = "autoscaling.x-k8s.io"
QUEUED = ("train.epochs=2", "launch.cluster.queue=small")
LONG = ("train.epochs=8", "launch.cluster.queue=small")
"""Training that is not over before another job takes its place."""
JOBSET = pytest.param("jobset", marks=pytest.mark.cluster_full("jobset.x-k8s.io"))


@pytest.fixture(scope="module")
def queue(cluster: Cluster, namespace: str, image: str) -> Iterator[str]:
    """Queue with quota for the memory of two pods, so one job at a time, and preemption by priority."""
    with cluster_queue(cluster, namespace, "small", preemption={"withinClusterQueue": "LowerPriority"}) as name:
        Training(cluster, namespace, image, "first", "job", stage="shard").succeed()
        yield name


@pytest.fixture(scope="module")
def priorities(cluster: Cluster, namespace: str) -> Iterator[dict[str, str]]:
    """Priority classes `low` and `high`. They preempt no pods by themselves, only through Kueue."""
    names = {name: f"{namespace}-{name}" for name in ("low", "high")}
    api = "scheduling.k8s.io/v1"
    for value, name in enumerate(names.values(), 1):
        metadata = {"name": name}
        values = {"value": value, "preemptionPolicy": "Never"}
        cluster.create("", {"apiVersion": api, "kind": "PriorityClass", "metadata": metadata, **values})
    yield names
    for name in names.values():
        cluster.delete("", api, "PriorityClass", name)


@contextmanager
def cluster_queue(cluster: Cluster, namespace: str, local: str, **spec: Any) -> Iterator[str]:
    """Yield the name of a ClusterQueue with the memory of two pods, and of a LocalQueue for it.

    It has a quota for every resource that the pods request, because Kueue admits no job with other resources.
    """
    flavor, shared = f"{namespace}-{local}-flavor", f"{namespace}-{local}"
    quotas = {"cpu": "8", "memory": "3584Mi", "ephemeral-storage": "100Gi"}
    listed = [{"name": name, "nominalQuota": amount} for name, amount in quotas.items()]
    group = {"coveredResources": list(quotas), "flavors": [{"name": flavor, "resources": listed}]}
    cluster.create("", _object("ResourceFlavor", flavor))
    cluster.create("", _object("ClusterQueue", shared, {"namespaceSelector": {}, "resourceGroups": [group], **spec}))
    cluster.create(namespace, _object("LocalQueue", local, {"clusterQueue": shared}))
    try:
        yield shared
    finally:
        cluster.delete(namespace, API, "LocalQueue", local)
        cluster.delete("", API, "ClusterQueue", shared)
        cluster.delete("", API, "ResourceFlavor", flavor)


@pytest.mark.parametrize("backend", ["pytorchjob", JOBSET])
def test_the_second_of_two_jobs_waits_for_the_first(
    backend: str, cluster: Cluster, namespace: str, image: str, queue: str
) -> None:
    first = Training(cluster, namespace, image, f"first-{backend}", backend, *QUEUED)
    cluster.wait("the first job's pods", lambda: len(first.pods()) == 2)
    second = Training(cluster, namespace, image, f"second-{backend}", backend, *QUEUED)
    cluster.wait("the second job's suspension", lambda: "Suspended" in second.conditions())
    assert second.pods() == []
    first.succeed()
    second.succeed()
    first.delete()
    second.delete()


@pytest.mark.parametrize("backend", ["pytorchjob", JOBSET])
def test_a_preempted_job_saves_waits_and_resumes_to_the_same_bits(
    backend: str,
    cluster: Cluster,
    namespace: str,
    image: str,
    queue: str,
    priorities: dict[str, str],
    tmp_path: Path,
) -> None:
    calm = Training(cluster, namespace, image, f"calm-{backend}", backend, *LONG)
    calm.succeed()
    undisturbed = calm.result()
    calm.delete()
    low, high = (f"launch.cluster.priority_class={priorities[name]}" for name in ("low", "high"))
    training = Training(cluster, namespace, image, f"taken-{backend}", backend, *LONG, low)
    training.wait_for_step(12)
    urgent = Training(cluster, namespace, image, f"urgent-{backend}", backend, *QUEUED, high)
    cluster.wait("the preemption", lambda: "Suspended" in training.conditions())
    entry = status(tmp_path, namespace, image, training.spec.run)
    assert (entry["phase"], entry["kueue_reason"]) == ("queued", "Preempted")
    assert f"{urgent.backend.kind} urgent-{backend}" in entry["reason"]
    urgent.succeed()
    training.succeed()
    result = training.result()
    assert result.same_bits(undisturbed)
    assert "resumed" in result.events
    assert result.repeated == 0  # it saved when it was preempted
    for job in (training, urgent):
        job.delete()


@pytest.mark.cluster_full(AUTOSCALER)
def test_a_job_waits_until_its_nodes_are_provided(
    cluster: Cluster, namespace: str, image: str, queue: str, tmp_path: Path
) -> None:
    """The chart's queue and check, and Kueue's own request for nodes; the test acts as the autoscaler."""
    flavor = {"name": "requested", "quotas": {"cpu": 100, "memory": "100Gi", "ephemeral-storage": "100Gi"}}
    provisioning = {"className": "podscale.dev.test", "parameters": {"maxRunDurationSeconds": "3600"}}
    values = {"enabled": True, "localQueue": "requested", "flavors": [flavor], "provisioning": provisioning}
    objects = helm.template(None, {"kueue": values}, release=namespace, namespace=namespace)
    made = [item for item in objects if item["apiVersion"] == API]
    assert {item["kind"] for item in made} >= {"AdmissionCheck", "ProvisioningRequestConfig", "ClusterQueue"}
    for item in made:
        cluster.create(item["metadata"].get("namespace", ""), item)
    settings = ("train.epochs=2", "launch.cluster.queue=requested")
    training = Training(cluster, namespace, image, "requested", "pytorchjob", *settings)

    def request() -> Any:
        return next(iter(cluster.all_of(namespace, f"{AUTOSCALER}/v1", "ProvisioningRequest")), None)

    name = cluster.wait("Kueue's request", request)["metadata"]["name"]
    assert request()["spec"]["provisioningClassName"] == "podscale.dev.test"
    assert [pods["count"] for pods in request()["spec"]["podSets"]] == [2]

    def answer(**conditions: str) -> None:
        entries = [
            {"type": kind, "status": "True", "reason": kind, "message": message, "lastTransitionTime": _now()}
            for kind, message in conditions.items()
        ]
        cluster.patch_status(namespace, f"{AUTOSCALER}/v1", "ProvisioningRequest", name, {"conditions": entries})

    def reason() -> str:
        entry = status(tmp_path, namespace, image, "requested")
        assert entry["phase"] == "queued"
        return str(entry["reason"])

    answer(Accepted="accepted")
    cluster.wait("the check in the status", lambda: f"{namespace}-nodes" in reason())
    assert training.pods() == []
    answer(Accepted="accepted", Provisioned="provided")
    cluster.wait("its pods", lambda: len(training.pods()) == 2)
    training.succeed()
    training.delete()
    for item in sorted(made, key=lambda item: DELETION_ORDER.index(item["kind"])):
        cluster.delete(item["metadata"].get("namespace", ""), API, item["kind"], item["metadata"]["name"])


def test_a_job_that_never_fits_stays_suspended(cluster: Cluster, namespace: str, image: str, queue: str) -> None:
    training = Training(cluster, namespace, image, "large", "pytorchjob", *QUEUED, "launch.nodes=4")
    name = cluster.wait("its workload", lambda: _workload(cluster, namespace, "large"))

    def refused() -> list[Any]:
        return [entry for entry in _conditions(cluster, namespace, name, "False") if entry["type"] == "QuotaReserved"]

    (condition,) = cluster.wait("Kueue's answer", refused)
    assert "insufficient quota for memory" in condition["message"]
    assert training.pods() == []
    training.delete()


def status(folder: Path, namespace: str, image: str, run: str) -> dict[str, Any]:
    """Return the entry that `podscale status --json` prints for the job of a run."""
    done = Launcher(folder, namespace, image, run).command("status", "--json")
    assert done.returncode == 0, done.stderr
    (entry,) = json.loads(done.stdout)
    return dict(entry)


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _conditions(cluster: Cluster, namespace: str, workload: str, status: str) -> list[dict[str, Any]]:
    """Return the conditions of a Workload that have this status."""
    conditions = cluster.get(namespace, API, "Workload", workload).get("status", {}).get("conditions", [])
    return [dict(condition) for condition in conditions if condition["status"] == status]


def _workload(cluster: Cluster, namespace: str, job: str) -> str:
    """Return the name of the workload that Kueue created for a job."""
    for workload in cluster.all_of(namespace, API, "Workload"):
        if any(owner["name"] == job for owner in workload["metadata"].get("ownerReferences", [])):
            return str(workload["metadata"]["name"])
    return ""


def _object(kind: str, name: str, spec: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"apiVersion": API, "kind": kind, "metadata": {"name": name}, "spec": spec or {}}
