"""Quotas of the namespace, compared with what the pods of a job need."""

from typing import Any

import pytest

from podscale import config
from podscale.kubernetes.client import ClusterClient
from podscale.kubernetes.job_spec import JobSpec, build_job_spec
from podscale.kubernetes.quota import check_quotas, job_needs, quota_applies
from podscale.util.terminal import CheckResult
from tests.support.fake_cluster import FakeCluster

DOCUMENT = ("run.id=r1", "run.workspace=/work", "launch.nodes=2", "launch.cluster.workspace_claim=w")
GPUS = ("launch.hardware=nvidia-l4", "launch.processes=1")
UNKNOWN = (*("launch.resources.accelerator=example.com/gpu", "launch.resources.accelerators=1", "launch.processes=1"),)


def spec(*changes: str) -> JobSpec:
    return build_job_spec(config.load(None, (*DOCUMENT, *changes)), "train")


def check_quota(
    api: ClusterClient, cluster: FakeCluster, hard: dict[str, str], *changes: str, **parts: Any
) -> CheckResult:
    status = {"hard": hard, "used": parts.get("used", {})}
    cluster.put("resourcequotas", {"metadata": {"name": "q"}, "spec": parts.get("spec", {}), "status": status})
    (result,) = check_quotas(api, spec(*changes), "pytorchjob")
    return result


@pytest.mark.parametrize(
    ("hard", "used", "changes", "verdict"),
    [
        ({"pods": "2"}, {}, (), "ok"),
        ({"pods": "2"}, {"pods": "1"}, (), "missing"),
        ({"pods": "1"}, {}, (), "missing"),
        ({"requests.nvidia.com/gpu": "0"}, {"requests.nvidia.com/gpu": "0"}, (), "ok"),
        ({"requests.nvidia.com/gpu": "0"}, {"requests.nvidia.com/gpu": "0"}, GPUS, "missing"),
        ({"services.loadbalancers": "0", "count/secrets": "0"}, {}, (), "ok"),
        ({"requests.cpu": "1", "requests.memory": "4Gi"}, {}, (), "ok"),
        ({"requests.cpu": "1"}, {"requests.cpu": "100m"}, (), "missing"),
        ({"cpu": "900m"}, {}, (), "missing"),
        ({"limits.memory": "30Gi"}, {}, (), "missing"),
        ({"limits.memory": "30Gi"}, {}, ("launch.resources.memory_gib=4",), "ok"),
        ({"requests.cpu": "64"}, {}, UNKNOWN, "missing"),
        ({"requests.ephemeral-storage": "10Gi"}, {}, (), "missing"),
        ({"count/pytorchjobs.kubeflow.org": "3"}, {"count/pytorchjobs.kubeflow.org": "3"}, (), "missing"),
        ({"count/jobsets.jobset.x-k8s.io": "0"}, {}, (), "ok"),
        ({"pods": "0"}, {"pods": "3"}, (), "missing"),
        ({}, {}, (), "ok"),
    ],
)
def test_what_the_pods_need_is_compared_with_what_is_left(
    api: ClusterClient, cluster: FakeCluster, hard: dict[str, str], used: dict[str, str], changes: tuple[str, ...],
    verdict: str,
) -> None:  # fmt: skip
    result = check_quota(api, cluster, hard, "launch.processes=2", *changes, used=used)
    assert result.verdict == verdict, result
    assert (result.advice == "") == (verdict == "ok")


def test_a_quota_used_up_by_others_is_no_problem_of_a_job_that_does_not_need_it(
    api: ClusterClient, cluster: FakeCluster
) -> None:
    assert (
        check_quota(api, cluster, {"persistentvolumeclaims": "1"}, used={"persistentvolumeclaims": "1"}).verdict == "ok"
    )


def selected(operator: str, *values: str) -> dict[str, Any]:
    """Return a quota for pods whose priority class matches."""
    expression = {"scopeName": "PriorityClass", "operator": operator, "values": list(values)}
    return {"scopeSelector": {"matchExpressions": [expression]}}


@pytest.mark.parametrize(
    ("quota_spec", "changes", "applies"),
    [
        ({}, (), True),
        ({"scopes": ["BestEffort"]}, (), False),
        ({"scopes": ["NotBestEffort"]}, (), True),
        ({"scopes": ["BestEffort"]}, UNKNOWN, True),
        ({"scopes": ["Terminating"]}, (), False),
        ({"scopes": ["NotTerminating"]}, (), True),
        (selected("In", "urgent"), (), False),
        (selected("NotIn", "urgent"), (), True),
        (selected("In", "urgent"), ("launch.cluster.priority_class=urgent",), True),
        (selected("Exists"), (), False),
        (selected("DoesNotExist"), (), True),
    ],
)
def test_the_scopes_of_a_quota(quota_spec: dict[str, Any], changes: tuple[str, ...], applies: bool) -> None:
    assert quota_applies(quota_spec, spec(*changes)) is applies


def test_the_needs_of_a_job_count_every_pod() -> None:
    one, two = (job_needs(spec(f"launch.nodes={nodes}"), "pytorchjob") for nodes in (1, 2))
    assert two["requests.cpu"] == two["cpu"] == 2 * one["cpu"] > 0
    assert two["limits.memory"] == 2 * one["limits.memory"]
    assert two["count/pytorchjobs.kubeflow.org"] == one["count/pytorchjobs.kubeflow.org"] == 1
