"""Run of the pipeline that a launcher belongs to, from its own pod, as far as its rights allow."""

from typing import Any

import pytest

from podscale.kubernetes.client import ClusterClient
from podscale.kubernetes.pipeline_run import PipelineRun, find_pipeline_run
from tests.support.fake_cluster import FakeCluster

POD = "wf-x7k2p-system-container-impl-123"
WORKFLOW = {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "name": "wf-x7k2p", "uid": "w"}
BY_NAME = PipelineRun("wf-x7k2p-system-container-impl")


def put_pod(cluster: FakeCluster, *owners: dict[str, Any]) -> None:
    cluster.put("pods", {"metadata": {"name": POD, "ownerReferences": list(owners)}})


def test_outside_of_kfps_pods_there_is_no_run(api: ClusterClient, cluster: FakeCluster) -> None:
    assert find_pipeline_run(api, {}) is None
    assert cluster.seen == []


def test_the_workflow_of_the_pod_owns_the_job_without_controlling_it(api: ClusterClient, cluster: FakeCluster) -> None:
    put_pod(cluster, {"kind": "Other", "uid": "o"}, {**WORKFLOW, "controller": True, "blockOwnerDeletion": True})
    assert find_pipeline_run(api, {"KFP_POD_NAME": POD}) == PipelineRun("w", WORKFLOW)


@pytest.mark.parametrize("how", ["denied", "absent", "not owned", "another kind"])
def test_without_a_workflow_the_pods_name_identifies_the_run(
    api: ClusterClient, cluster: FakeCluster, how: str
) -> None:
    owners = {"not owned": [], "another kind": [{**WORKFLOW, "kind": "CronWorkflow"}]}
    if how != "absent":
        put_pod(cluster, *owners.get(how, [WORKFLOW]))
    if how == "denied":
        cluster.denied.add(("get", "pods"))
    assert find_pipeline_run(api, {"KFP_POD_NAME": POD}) == BY_NAME
    assert find_pipeline_run(api, {"KFP_POD_NAME": POD.replace("123", "456")}) == BY_NAME


def test_a_workflow_cannot_own_jobs_of_another_namespace(api: ClusterClient, cluster: FakeCluster) -> None:
    put_pod(cluster, WORKFLOW)
    assert find_pipeline_run(api, {"KFP_POD_NAME": POD, "NAMESPACE": "kubeflow"}) == BY_NAME
