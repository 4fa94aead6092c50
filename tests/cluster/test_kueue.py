"""Kueue admits jobs by quota: the second of two is suspended until the first is done."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.training import Training

pytestmark = [pytest.mark.timeout(1800), pytest.mark.cluster_full("kueue.x-k8s.io")]
API = "kueue.x-k8s.io/v1beta2"
QUEUED = ("train.epochs=2", "launch.cluster.queue=small")


@pytest.fixture(scope="module")
def queue(cluster: Cluster, namespace: str, image: str) -> Iterator[str]:
    """Queue with quota for the memory of two pods, so one job at a time.

    It has a quota for every resource that the pods request, because Kueue admits no job with other resources.
    """
    flavor, shared = f"{namespace}-flavor", f"{namespace}-queue"
    quotas = {"cpu": "8", "memory": "3584Mi", "ephemeral-storage": "100Gi"}
    listed = [{"name": name, "nominalQuota": amount} for name, amount in quotas.items()]
    group = {"coveredResources": list(quotas), "flavors": [{"name": flavor, "resources": listed}]}
    cluster.create("", _object("ResourceFlavor", flavor))
    cluster.create("", _object("ClusterQueue", shared, {"namespaceSelector": {}, "resourceGroups": [group]}))
    cluster.create(namespace, _object("LocalQueue", "small", {"clusterQueue": shared}))
    Training(cluster, namespace, image, "first", "job", stage="shard").succeed()
    yield shared
    cluster.delete(namespace, API, "LocalQueue", "small")
    cluster.delete("", API, "ClusterQueue", shared)
    cluster.delete("", API, "ResourceFlavor", flavor)


@pytest.mark.parametrize(
    "backend", ["pytorchjob", pytest.param("jobset", marks=pytest.mark.cluster_full("jobset.x-k8s.io"))]
)
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


def test_a_job_that_never_fits_stays_suspended(cluster: Cluster, namespace: str, image: str, queue: str) -> None:
    training = Training(cluster, namespace, image, "large", "pytorchjob", *QUEUED, "launch.nodes=4")
    name = cluster.wait("its workload", lambda: _workload(cluster, namespace, "large"))

    def refused() -> list[Any]:
        conditions = cluster.get(namespace, API, "Workload", name).get("status", {}).get("conditions", [])
        return [entry for entry in conditions if entry["type"] == "QuotaReserved" and entry["status"] == "False"]

    (condition,) = cluster.wait("Kueue's answer", refused)
    assert "insufficient quota for memory" in condition["message"]
    assert training.pods() == []
    training.delete()


def _workload(cluster: Cluster, namespace: str, job: str) -> str:
    """Return the name of the workload that Kueue created for a job."""
    for workload in cluster.all_of(namespace, API, "Workload"):
        if any(owner["name"] == job for owner in workload["metadata"].get("ownerReferences", [])):
            return str(workload["metadata"]["name"])
    return ""


def _object(kind: str, name: str, spec: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"apiVersion": API, "kind": kind, "metadata": {"name": name}, "spec": spec or {}}
