"""`podscale doctor --cluster`: every line is true, and names the remedy if something is missing."""

from collections.abc import Callable
from typing import Any

import pytest

from podscale import config
from podscale.kubernetes import image_check
from podscale.kubernetes.cluster_doctor import PERMISSION_RULES, check_cluster
from podscale.kubernetes.resources import parse_quantity
from podscale.util.terminal import CheckResult
from tests.support.cluster_objects import condition
from tests.support.fake_cluster import FakeCluster
from tests.support.fake_state import Answer

DOCUMENT = ("run.id=r1", "run.workspace=/work", "launch.nodes=2", "launch.cluster.workspace_claim=w")
GPU = {"nvidia.com/gpu": "8", "cpu": "200", "memory": "1800Gi", "ephemeral-storage": "1Ti"}
LABEL = {"cloud.google.com/gke-accelerator": "nvidia-h100-80gb"}


@pytest.fixture
def healthy(cluster: FakeCluster) -> FakeCluster:
    """Make a cluster on which nothing is missing."""
    named = {"name": "train", "labels": {"pod-security.kubernetes.io/enforce": "restricted"}}
    cluster.put("namespaces", {"metadata": named})
    claim = {"metadata": {"name": "w"}, "spec": {"accessModes": ["ReadWriteMany"]}, "status": {"phase": "Bound"}}
    cluster.put("persistentvolumeclaims", claim)
    for number in range(2):
        node(cluster, f"n{number}", {"cpu": "8", "memory": "64Gi", "ephemeral-storage": "90Gi"})
    spec = {"template": {"spec": {"containers": [{"image": "operator:1.9.4"}]}}}
    deployment = {"metadata": {"name": "training-operator"}, "spec": spec, "status": {"readyReplicas": 1}}
    cluster.put("deployments", deployment, "kubeflow")
    return cluster


def node(cluster: FakeCluster, name: str, size: dict[str, str], labels: dict[str, str] | None = None) -> None:
    cluster.put("nodes", {"metadata": {"name": name, "labels": labels or {}}, "status": {"allocatable": size}})


def check_results(*changes: str, pull: bool = False) -> dict[str, CheckResult]:
    """Return the results, by default without the images, because no kubelet answers here."""
    loaded = config.load(None, (*DOCUMENT, *changes))
    return {result.subject: result for result in check_cluster(loaded, pull=pull)}


def test_a_healthy_cluster_misses_nothing(healthy: FakeCluster) -> None:
    results = check_results()
    assert [result for result in results.values() if result.verdict == "missing"] == []
    for subject in ("API server", "kind PyTorchJob", "training-operator", "permissions", "claim w", "the job itself"):
        assert results[subject].verdict == "ok", results[subject]
    assert healthy.all("pytorchjobs") == healthy.all("networkpolicies") == []


def test_every_result_that_is_not_fine_names_the_remedy(healthy: FakeCluster) -> None:
    for result in check_results("launch.cluster.queue=lq").values():
        assert result.found
        assert (result.verdict == "ok") == (result.advice == ""), result


def test_credentials_that_are_refused_are_one_line(healthy: FakeCluster) -> None:
    healthy.tokens.clear()
    (result,) = check_results().values()
    assert result.verdict == "missing"
    assert result.subject == "API server"
    assert "HTTP 401" in result.found


@pytest.mark.parametrize("pull", [False, True])
def test_images_are_pulled_unless_declined(healthy: FakeCluster, monkeypatch: pytest.MonkeyPatch, pull: bool) -> None:
    monkeypatch.setattr(image_check, "PULL_SECONDS", 0.0)
    results = check_results("launch.image=mine:1", pull=pull)
    assert ("image mine:1" in results) is pull
    assert any(seen.method == "POST" and seen.path.endswith("/jobs") for seen in healthy.seen) is pull
    assert healthy.all("jobs") == []


def remove_kind(cluster: FakeCluster) -> None:
    cluster.kinds["kubeflow.org/v1"].clear()


def no_claim(cluster: FakeCluster) -> None:
    cluster.remove("persistentvolumeclaims", "w")


def one_writer(cluster: FakeCluster) -> None:
    cluster.put(
        "persistentvolumeclaims",
        {"metadata": {"name": "w"}, "spec": {"accessModes": ["ReadWriteOnce"]}, "status": {"phase": "Bound"}},
    )


def operator_down(cluster: FakeCluster) -> None:
    (deployment,) = cluster.all("deployments")
    cluster.put("deployments", {**deployment, "status": {}}, "kubeflow")


def full_quota(cluster: FakeCluster) -> None:
    status = {"hard": {"pods": "2", "cpu": "8"}, "used": {"pods": "2", "cpu": "1500m"}}
    cluster.put("resourcequotas", {"metadata": {"name": "few"}, "status": status})


def no_creating(cluster: FakeCluster) -> None:
    cluster.denied.add(("create", "pytorchjobs"))


def no_events(cluster: FakeCluster) -> None:
    cluster.denied.add(("list", "events"))


def webhook(cluster: FakeCluster) -> None:
    def refuse(plural: str, body: dict[str, Any]) -> Answer | None:
        return Answer(403, "Forbidden", "denied the request: no") if plural == "pytorchjobs" else None

    cluster.admission.append(refuse)


def no_namespace(cluster: FakeCluster) -> None:
    cluster.remove("namespaces", "train")


CASES: dict[str, tuple[Callable[[FakeCluster], None], str, str, str]] = {
    "a kind that is wanted and absent": (remove_kind, "kind PyTorchJob", "missing", "kubectl apply --server-side"),
    "a claim that is absent": (no_claim, "claim w", "missing", "workspace_claim"),
    "a claim for one node": (one_writer, "claim w", "note", "ReadWriteMany"),
    "an operator that is down": (operator_down, "training-operator", "missing", "kubectl describe pods -n kubeflow"),
    "a quota that is used up": (full_quota, "quota few", "missing", "wait for other jobs"),
    "a permission that is needed": (no_creating, "permissions on pytorchjobs.kubeflow.org", "missing", "launcher role"),
    "a permission that would help": (no_events, "permissions on events", "note", "launcher role"),
    "a job that admission refuses": (webhook, "the job itself", "missing", "podscale submit"),
    "a namespace that is absent": (no_namespace, "namespace train", "missing", "kubectl create namespace train"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_failed_check_names_the_remedy(healthy: FakeCluster, name: str) -> None:
    spoil, subject, verdict, advice = CASES[name]
    spoil(healthy)
    result = check_results("launch.backend=pytorchjob")[subject]
    assert result.verdict == verdict
    assert advice in result.advice


def test_a_storage_class_may_say_that_it_is_not_the_default(healthy: FakeCluster) -> None:
    for name, is_default in (("slow", "false"), ("fast", "true")):
        annotations = {"storageclass.kubernetes.io/is-default-class": is_default}
        healthy.put("storageclasses", {"metadata": {"name": name, "annotations": annotations}})
    result = check_results("launch.cluster.workspace_claim=null", "run.workspace=/work")["workspace"]
    assert "slow, fast (default fast)" in result.found


def test_the_default_init_container_is_reported_if_admission_refuses_it(healthy: FakeCluster) -> None:
    assert "--pytorch-init-container-template-file" in check_results()["init container"].advice
    (deployment,) = healthy.all("deployments")
    deployment["spec"]["args"] = ["--pytorch-init-container-template-file=/etc/config/init.yaml"]
    healthy.put("deployments", deployment, "kubeflow")
    assert "init container" not in check_results()


@pytest.mark.parametrize(
    ("nodes", "verdict"),
    [([], "note"), ([GPU], "note"), ([GPU, GPU], "ok"), ([{**GPU, "nvidia.com/gpu": "4"}] * 2, "missing")],
    ids=["no such pool", "one node for two pods", "two nodes", "nodes with half the GPUs"],
)
def test_node_pools_are_compared_with_the_hardware(healthy: FakeCluster, nodes: list[Any], verdict: str) -> None:
    for number, size in enumerate(nodes):
        node(healthy, f"gpu{number}", size, LABEL)
    result = check_results(
        "launch.hardware=nvidia-h100-80gb x8", "launch.cluster.network=plain", "launch.cluster.security=restricted"
    )
    assert result["nodes for nvidia-h100-80gb x8"].verdict == verdict


@pytest.mark.parametrize(
    ("change", "label"),
    [
        ("launch.cluster.spot=true", "cloud.google.com/gke-spot=true"),
        ("launch.cluster.reservation=r", "cloud.google.com/reservation-name=r"),
        ("launch.cluster.compute_class=c", "cloud.google.com/compute-class=c"),
        ("launch.cluster.local_ssd=true", "cloud.google.com/gke-ephemeral-storage-local-ssd=true"),
    ],
)
def test_nodes_without_placement_labels_are_not_counted(healthy: FakeCluster, change: str, label: str) -> None:
    result = check_results(change)["nodes for cpu"]
    assert (result.verdict, label in result.found) == ("note", True)


def test_nodes_with_too_small_a_disk_do_not_fit(healthy: FakeCluster) -> None:
    result = check_results("launch.resources.ephemeral_gib=200")["nodes for cpu"]
    assert result.verdict == "missing"
    assert "90Gi ephemeral-storage" in result.found


def queue(cluster: FakeCluster, active: str, frameworks: str) -> None:
    state = {"conditions": [condition("Active", active, "", "ClusterQueue cq is stopped")]}
    cluster.put("localqueues", {"metadata": {"name": "lq"}, "spec": {"clusterQueue": "cq"}, "status": state})
    text = f"integrations:\n  frameworks:\n  - batch/job\n{frameworks}"
    cluster.put("configmaps", {"metadata": {"name": "kueue-manager-config"}, "data": {"c.yaml": text}}, "kueue-system")


@pytest.mark.parametrize(
    ("active", "frameworks", "verdicts"),
    [
        ("True", "  - kubeflow.org/pytorchjob\n", ("ok", "ok")),
        ("True", "  # - kubeflow.org/pytorchjob\n", ("ok", "missing")),
        ("False", '  - "kubeflow.org/pytorchjob"\n', ("missing", "ok")),
    ],
)
def test_a_queue_must_be_active_and_manage_the_kind(
    healthy: FakeCluster, active: str, frameworks: str, verdicts: tuple[str, str]
) -> None:
    queue(healthy, active, frameworks)
    results = check_results("launch.cluster.queue=lq")
    assert (results["queue lq"].verdict, results["Kueue's kinds"].verdict) == verdicts


def test_objects_that_may_not_be_read_are_not_reported_as_missing(healthy: FakeCluster) -> None:
    unseen = ("namespaces", "nodes", "deployments", "resourcequotas", "persistentvolumeclaims")
    healthy.denied |= {(verb, plural) for plural in unseen for verb in ("get", "list")}
    results = check_results()
    assert [result for result in results.values() if result.verdict == "missing"] == []
    assert results["nodes for cpu"].verdict == results["operators"].verdict == "note"


WORKFLOW_DEFAULTS = """spec:
  templateDefaults:
    retryStrategy: {limit: "2", retryPolicy: %s}
"""
OLDER_CONFIG = "workflowDefaults: {spec: {templateDefaults: {retryStrategy: {retryPolicy: Always}}}}"


def with_pipelines(cluster: FakeCluster, data: dict[str, str] | None) -> None:
    """Let KFP answer, with the ConfigMap of its workflow controller."""
    cluster.served["ml-pipeline:8888"] = "{}"
    if data is not None:
        cluster.put("configmaps", {"metadata": {"name": "workflow-controller-configmap"}, "data": data}, "kubeflow")


@pytest.mark.parametrize(
    ("data", "verdict", "keys"),
    [
        (
            {"workflowDefaults": WORKFLOW_DEFAULTS % "OnError"},
            "note",
            ("OnError", "launcher_grace_minutes", "launcher"),
        ),
        ({"config": OLDER_CONFIG}, "note", ("Always", "launcher_grace_minutes")),
        ({"workflowDefaults": "spec: {ttlStrategy: {secondsAfterCompletion: 60}}"}, "ok", ()),
        ({"workflowDefaults": "not: [yaml"}, "ok", ()),
        ({}, "ok", ()),
    ],
)
def test_a_default_retry_strategy_of_pipelines_is_explained(
    healthy: FakeCluster, data: dict[str, str], verdict: str, keys: tuple[str, ...]
) -> None:
    with_pipelines(healthy, data)
    result = check_results()["retries of pipelines"]
    assert result.verdict == verdict, result
    assert all(key in result.found for key in keys), result
    assert ("podscale stop" in result.advice) == (verdict == "note")


def test_without_the_right_to_read_it_the_retry_strategy_is_unknown(healthy: FakeCluster) -> None:
    with_pipelines(healthy, {"workflowDefaults": WORKFLOW_DEFAULTS % "OnError"})
    healthy.denied.add(("get", "configmaps"))
    result = check_results()["retries of pipelines"]
    assert result.verdict == "note"
    assert "OnError" not in result.found


def test_a_cluster_without_that_config_map_has_no_line_about_it(healthy: FakeCluster) -> None:
    with_pipelines(healthy, None)
    assert "retries of pipelines" not in check_results()


def test_kubeflow_pipelines_is_reached_through_the_api_server(healthy: FakeCluster) -> None:
    asked = len(healthy.seen)
    assert check_results()["Kubeflow Pipelines"].verdict == "note"
    assert sum("ml-pipeline" in seen.path for seen in healthy.seen[asked:]) == 1  # no retry: 503 is the answer here


def test_the_table_of_permissions_names_each_permission_once() -> None:
    permissions = [(rule.name, verb) for rule in PERMISSION_RULES for verb in rule.verbs]
    assert len(set(permissions)) == len(permissions)
    assert {"pods", "pods/log", "pytorchjobs.kubeflow.org", "networkpolicies.networking.k8s.io"} <= {
        rule.name for rule in PERMISSION_RULES
    }
    assert {rule.base_resource for rule in PERMISSION_RULES if rule.name == "jobs/finalizers.batch"} == {"jobs.batch"}
    assert "services" not in {
        rule.name for rule in PERMISSION_RULES
    }  # the operators create them, with their own permissions


@pytest.mark.parametrize(
    ("text", "value"),
    [("100m", "0.1"), ("4", "4"), ("1536Mi", str(1536 * 2**20)), ("2k", "2000"), ("1e3", "1000"), ("?", "0")],
)
def test_quantities_are_read_as_kubernetes_writes_them(text: str, value: str) -> None:
    assert str(parse_quantity(text).normalize()) == str(parse_quantity(value).normalize())
