"""Allowed connections, computed from the network policies of the chart and of a job; each pair below is a claim."""

from typing import Any

import pytest
import yaml

from podscale.config import RunConfig
from podscale.kubernetes.job_spec import build_job_spec
from podscale.kubernetes.render import render_job
from podscale.kubernetes.render.common import MONITORING_NAMESPACES
from tests.support import helm
from tests.support.network_policy import End, Outside, Pod, reaches


def pod(component: str, run: str = "", **more: Any) -> Pod:
    labels = {"app.kubernetes.io/name": "podscale", "app.kubernetes.io/component": component}
    return Pod(component, labels=labels | ({"podscale.dev/run": run} if run else {}), **more)


RANK, PEER, OTHER_RUN = pod("train", "a"), pod("train", "a", ip="10.4.0.10"), pod("train", "b", ip="10.4.0.11")
SHARD, EVALUATE, LAUNCHER, UPLOADER = pod("shard"), pod("evaluate"), pod("launcher"), pod("uploader")
OURS = (RANK, SHARD, EVALUATE, LAUNCHER, UPLOADER)
ARGO = {"workflows.argoproj.io/workflow": "podscale-training-x7k2p"}  # on every pod of a workflow


def tasks() -> list[Pod]:
    """Return the pods of a compiled pipeline's tasks, with the labels of KFP and Argo."""
    _, platform = yaml.safe_load_all((helm.ROOT / "pipelines" / "digits.pipeline.yaml").read_text(encoding="utf-8"))
    executors = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    return [Pod(name, labels=executor["podMetadata"]["labels"] | ARGO) for name, executor in executors.items()]


TASKS = tasks()
DRIVER = Pod("driver", labels=ARGO)
STRANGER = Pod("stranger", labels={"app": "web"})
ELSEWHERE = Pod("elsewhere", namespace="default", ip="10.4.3.3")
PROMETHEUS = Pod("prometheus", namespace="monitoring")
COLLECTOR = Pod("collector", namespace="gmp-system")
AUTOPILOT = Pod("collector of Autopilot", namespace="gke-gmp-system")
LIAR = Pod("any pod that says so", namespace="default", labels={"app.kubernetes.io/name": "prometheus"})
DNS = Pod("kube-dns", namespace="kube-system", labels={"k8s-app": "kube-dns"})
DASHBOARD = Pod("dashboard", namespace="kube-system", labels={"k8s-app": "dashboard"})
KFP = Pod("ml-pipeline", namespace="kubeflow")
TRAINER = Pod("status server of Trainer", namespace="kubeflow-system")
API = Outside("API server", "10.0.0.1")
STORAGE = Outside("storage.googleapis.com", "142.250.74.123")
NODE_DNS = Outside("NodeLocal DNSCache", "169.254.20.10")
METADATA = Outside("metadata server, Calico", "169.254.169.252")
METADATA_V2 = Outside("metadata server, Dataplane V2", "169.254.169.254")
KFP_PORTS = (8080, 8333, 8887, 8888, 9000)  # metadata, SeaweedFS, API by gRPC and HTTP, MinIO; of pods, not Services

ALLOWED: list[tuple[End, End, int, str]] = [
    *((one, DNS, 53, "UDP") for one in OURS),
    (RANK, DNS, 53, "TCP"),
    (RANK, NODE_DNS, 53, "UDP"),
    *((one, STORAGE, 443, "TCP") for one in OURS),
    (RANK, METADATA, 988, "TCP"),
    (RANK, METADATA, 987, "TCP"),
    (RANK, METADATA_V2, 80, "TCP"),
    (RANK, METADATA_V2, 8080, "TCP"),
    (PROMETHEUS, RANK, 9464, "TCP"),
    (PROMETHEUS, SHARD, 9464, "TCP"),
    (COLLECTOR, RANK, 9464, "TCP"),
    (AUTOPILOT, RANK, 9464, "TCP"),
    (RANK, TRAINER, 10443, "TCP"),
    (LAUNCHER, API, 443, "TCP"),
    (LAUNCHER, API, 6443, "TCP"),
    (UPLOADER, KFP, 8888, "TCP"),
    *((task, KFP, port, "TCP") for task in TASKS for port in KFP_PORTS),
    *((task, API, 443, "TCP") for task in TASKS),  # Argo's container writes to it, KFP's launcher reads from it
    (TASKS[0], API, 6443, "TCP"),
    (TASKS[0], DNS, 53, "UDP"),
    (DRIVER, KFP, 8887, "TCP"),
    (STRANGER, ELSEWHERE, 80, "TCP"),
]
DENIED: list[tuple[End, End, int, str]] = [
    (RANK, PEER, 29500, "TCP"),  # the job's own policy allows it, see below
    (RANK, API, 443, "TCP"),
    (RANK, API, 6443, "TCP"),
    (EVALUATE, API, 443, "TCP"),
    (UPLOADER, API, 443, "TCP"),
    *((one, KFP, port, "TCP") for one in (RANK, EVALUATE, LAUNCHER) for port in KFP_PORTS),
    (UPLOADER, KFP, 9000, "TCP"),
    (TASKS[0], KFP, 22, "TCP"),
    (TASKS[0], RANK, 29500, "TCP"),
    (TASKS[0], STRANGER, 8888, "TCP"),
    (TASKS[0], ELSEWHERE, 8888, "TCP"),
    (STRANGER, TASKS[0], 8888, "TCP"),
    (RANK, STRANGER, 80, "TCP"),
    (RANK, TRAINER, 9443, "TCP"),
    (LAUNCHER, TRAINER, 10443, "TCP"),
    (RANK, ELSEWHERE, 443, "TCP"),
    (RANK, DASHBOARD, 53, "UDP"),
    (RANK, STORAGE, 80, "TCP"),
    (RANK, METADATA_V2, 443, "UDP"),
    (RANK, METADATA, 80, "TCP"),
    (STRANGER, RANK, 29500, "TCP"),
    (STRANGER, RANK, 9464, "TCP"),
    (ELSEWHERE, RANK, 9464, "TCP"),
    (LIAR, RANK, 9464, "TCP"),
    (PROMETHEUS, RANK, 29500, "TCP"),
    (LAUNCHER, RANK, 29500, "TCP"),
    (SHARD, RANK, 29500, "TCP"),
]


def policies(**values: Any) -> list[dict[str, Any]]:
    network = values.pop("networkPolicy", {})
    objects = helm.template(None, {"pipeline": {"upload": True}, "networkPolicy": network, **values})
    return helm.kinds(objects, "NetworkPolicy")


@pytest.fixture(scope="module")
def standard() -> list[dict[str, Any]]:
    return policies()


def name(pair: tuple[End, End, int, str]) -> str:
    source, target, port, protocol = pair
    return f"{source.name} to {target.name}:{port}/{protocol}"


@pytest.mark.parametrize("pair", ALLOWED, ids=name)
def test_allowed(standard: list[dict[str, Any]], pair: tuple[End, End, int, str]) -> None:
    assert reaches(standard, *pair)


@pytest.mark.parametrize("pair", DENIED, ids=name)
def test_denied(standard: list[dict[str, Any]], pair: tuple[End, End, int, str]) -> None:
    assert not reaches(standard, *pair)


def job(run: str) -> tuple[list[dict[str, Any]], Pod, Pod]:
    """Return the policy of a job with two pods, and the pods."""
    document = {
        "run": {"id": run, "workspace": "/workspace"},
        "launch": {"nodes": 2, "cluster": {"namespace": "podscale", "workspace_claim": "podscale-workspace"}},
    }
    manifests = render_job(build_job_spec(RunConfig.model_validate(document), "train"), "pytorchjob")
    labels = manifests.job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["metadata"]["labels"]
    first, second = (Pod(f"{run}-{rank}", labels=labels, ip=f"10.4.1.{rank}") for rank in (1, 2))
    return [item for item in manifests.owned_objects if item["kind"] == "NetworkPolicy"], first, second


def test_rank_to_rank_comes_with_each_job(standard: list[dict[str, Any]]) -> None:
    """Chart and jobs together: ranks of one job reach each other on any port, and those of another job do not."""
    policies_of_job, rank, peer = job("alpha")
    theirs, stranger, _ = job("beta")
    together = [*standard, *policies_of_job, *theirs]
    assert policies_of_job
    assert reaches(together, rank, peer, 29500)
    assert reaches(together, peer, rank, 41234)
    assert not reaches(together, rank, stranger, 29500)
    assert not reaches(together, stranger, rank, 29500)
    assert not reaches(together, STRANGER, rank, 29500)
    for policies_of_the_rank in (together, policies_of_job):
        assert all(reaches(policies_of_the_rank, one, rank, 9464) for one in (PROMETHEUS, COLLECTOR, AUTOPILOT))
        assert not reaches(policies_of_the_rank, PROMETHEUS, rank, 29500)
        assert not any(reaches(policies_of_the_rank, one, rank, 9464) for one in (LIAR, ELSEWHERE, STRANGER))
    assert not reaches(standard, rank, peer, 29500)


def test_chart_and_jobs_admit_the_same_namespaces() -> None:
    values = yaml.safe_load((helm.CHART / "values.yaml").read_text(encoding="utf-8"))
    assert tuple(values["networkPolicy"]["monitoringNamespaces"]) == MONITORING_NAMESPACES


def test_another_namespace_of_monitoring() -> None:
    """The chart's policy is additive to that of the job."""
    policies_of_job, rank, _ = job("alpha")
    wider = policies(networkPolicy={"monitoringNamespaces": ["observability"]})
    assert reaches([*wider, *policies_of_job], Pod("prometheus", namespace="observability"), rank, 9464)


def test_ranks_of_the_namespace() -> None:
    """With networkPolicy.ranks=namespace, pods of all runs reach each other, and no other pods reach them."""
    wide = policies(networkPolicy={"ranks": "namespace"})
    assert reaches(wide, RANK, PEER, 29500)
    assert reaches(wide, RANK, OTHER_RUN, 29500)
    assert not reaches(wide, LAUNCHER, RANK, 29500)
    assert not reaches(wide, STRANGER, RANK, 29500)


def test_denying_the_whole_namespace() -> None:
    """KFP's own pods are then denied too, and need the same rules as tasks of pipelines."""
    denied = policies(networkPolicy={"deny": "namespace"})
    assert not reaches(denied, STRANGER, ELSEWHERE, 80)
    for one in (DRIVER, *TASKS):
        assert all(reaches(denied, one, KFP, port) for port in KFP_PORTS)
        assert reaches(denied, one, API, 443)
        assert reaches(denied, one, DNS, 53, "UDP")
        assert reaches(denied, one, STORAGE, 443)
        assert not reaches(denied, one, ELSEWHERE, 80)


def test_pipelines_elsewhere() -> None:
    """Another namespace and object store, or no pipelines."""
    other = Pod("ml-pipeline", namespace="mlops")
    moved = policies(pipeline={"namespace": "mlops"}, networkPolicy={"pipelinePods": {"ports": [8887, 7070]}})
    assert reaches(moved, TASKS[0], other, 7070)
    assert not reaches(moved, TASKS[0], other, 9000)
    assert not reaches(moved, TASKS[0], KFP, 8887)
    without = policies(networkPolicy={"pipelinePods": {"enabled": False}})
    assert not reaches(without, TASKS[0], KFP, 8887)


def test_narrower_storage() -> None:
    narrow = policies(networkPolicy={"storage": {"cidrs": ["199.36.153.8/30"]}, "metadataServer": False})
    assert reaches(narrow, RANK, Outside("private.googleapis.com", "199.36.153.9"), 443)
    assert not reaches(narrow, RANK, STORAGE, 443)
    assert not reaches(narrow, RANK, METADATA, 988)


def test_without_policies_everything_is_open() -> None:
    assert policies(networkPolicy={"enabled": False}) == []
    assert reaches([], STRANGER, RANK, 29500)
