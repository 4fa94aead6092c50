"""The check of images: one Job whose pod pulls them, deleted in every case. The tests act as controller and kubelet."""

from collections.abc import Callable
from typing import Any

import pytest

from podscale import config
from podscale.kubernetes import image_check
from podscale.kubernetes.client import ClusterClient
from podscale.kubernetes.image_check import check_images
from podscale.kubernetes.job_spec import build_job_spec
from podscale.util.terminal import CheckResult
from tests.support.cluster_objects import pod, terminated, unschedulable, waiting
from tests.support.fake_cluster import FakeCluster
from tests.support.fake_state import Answer
from tests.support.pod_security import violations

IMAGE, LAUNCHER = "registry.example/podscale-gpu:1", "registry.example/podscale-tools:1"
DOCUMENT = (
    *("run.workspace=/work", "launch.cluster.workspace_claim=w", f"launch.image={IMAGE}", "launch.hardware=nvidia-l4"),
    *("launch.processes=1", "launch.cluster.service_account=trainer", "launch.cluster.image_pull_secrets=[registry]"),
    "launch.cluster.image_pull_policy=Always",
)
DONE = terminated(0, None, "Completed")
PULLING = waiting("ContainerCreating")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_check, "PULL_SECONDS", 0.3)
    monkeypatch.setattr(image_check, "POLL_SECONDS", 0.01)


@pytest.fixture
def jobs(cluster: FakeCluster) -> list[dict[str, Any]]:
    """Jobs that were created."""
    created: list[dict[str, Any]] = []

    def record(plural: str, body: dict[str, Any]) -> Answer | None:
        created.extend([body] if plural == "jobs" else [])
        return None

    cluster.admission.append(record)
    return created


def kubelet(cluster: FakeCluster, *states: dict[str, Any], made: dict[str, Any] | None = None) -> None:
    """Give each Job a pod whose containers are in these states."""

    def start(plural: str, body: dict[str, Any]) -> Answer | None:
        if plural == "jobs":
            started = made or pod(0, phase="Pending")
            started["metadata"]["labels"] = {"batch.kubernetes.io/job-name": body["metadata"]["name"]}
            del started["metadata"]["creationTimestamp"]
            if states:
                statuses = [{"name": f"image-{number}", "state": state} for number, state in enumerate(states)]
                started["status"]["containerStatuses"] = [{"name": "istio-proxy", "state": PULLING}, *statuses]
            cluster.put("pods", started)
        return None

    cluster.admission.append(start)


def results(api: ClusterClient, *changes: str, launcher: str = LAUNCHER) -> list[CheckResult]:
    spec = build_job_spec(config.load(None, (*DOCUMENT, *changes)), "train")
    return list(check_images(api, spec, launcher))


@pytest.mark.parametrize(
    ("states", "verdicts"),
    [
        ((DONE, DONE), ("ok", "ok")),
        ((waiting("ErrImagePull", "not found"), DONE), ("missing", "ok")),
        ((waiting("ImagePullBackOff", "Back-off"), waiting("ImagePullBackOff", "Back-off")), ("missing", "note")),
        ((waiting("InvalidImageName"), DONE), ("missing", "ok")),
        ((terminated(127, None, "StartError"), DONE), ("missing", "ok")),
        ((DONE, waiting("ErrImagePull", "not found")), ("ok", "note")),
        ((PULLING, PULLING), ("note", "note")),
        ((DONE, PULLING), ("ok", "note")),
    ],
)
def test_each_image_has_one_result(
    api: ClusterClient,
    cluster: FakeCluster,
    jobs: list[dict[str, Any]],
    states: tuple[dict[str, Any], ...],
    verdicts: tuple[str, str],
) -> None:
    kubelet(cluster, *states)
    found = results(api)
    assert [result.subject for result in found] == [f"image {IMAGE}", f"image {LAUNCHER}"]
    assert tuple(result.verdict for result in found) == verdicts, found
    assert all((result.advice == "") == (result.verdict == "ok") for result in found)
    assert len(jobs) == 1
    assert cluster.all("jobs") == [], "the Job is deleted"


def test_the_pod_has_the_credentials_of_the_run_and_asks_for_no_accelerator(
    api: ClusterClient, cluster: FakeCluster, jobs: list[dict[str, Any]]
) -> None:
    kubelet(cluster, DONE, DONE)
    results(api, "launch.cluster.node_selector={pool: mine}")
    (job,) = jobs
    spec = job["spec"]["template"]["spec"]
    assert spec["serviceAccountName"] == "trainer"
    assert spec["imagePullSecrets"] == [{"name": "registry"}]
    assert spec["nodeSelector"] == {"pool": "mine"}
    assert {container["imagePullPolicy"] for container in spec["containers"]} == {"Always"}
    assert violations(spec) == []
    assert "nvidia.com/gpu" not in str([container["resources"] for container in spec["containers"]])
    assert job["spec"]["ttlSecondsAfterFinished"], "the cluster deletes it if this process is killed"
    assert job["spec"]["activeDeadlineSeconds"] < 600
    assert "podscale.dev/run" not in job["metadata"]["labels"], "`podscale list` does not show it"


def test_one_image_for_both_is_one_container(
    api: ClusterClient, cluster: FakeCluster, jobs: list[dict[str, Any]]
) -> None:
    kubelet(cluster, DONE)
    (result,) = results(api, launcher=IMAGE)
    assert result.verdict == "ok"


def test_a_pod_that_finds_no_node_is_not_a_missing_image(api: ClusterClient, cluster: FakeCluster) -> None:
    kubelet(cluster, made=unschedulable(0, "0/1 nodes are available: 1 Insufficient cpu."))
    for result in results(api):
        assert result.verdict == "note"
        assert "Insufficient cpu" in result.found


@pytest.mark.parametrize(
    "refuse",
    [
        lambda cluster: cluster.denied.add(("create", "jobs")),
        lambda cluster: cluster.admission.append(lambda *_: Answer(403, "Forbidden", "denied the request: no")),
    ],
    ids=["RBAC", "admission"],
)
def test_a_job_that_is_refused_is_no_missing_image(
    api: ClusterClient, cluster: FakeCluster, refuse: Callable[[FakeCluster], None]
) -> None:
    refuse(cluster)
    assert [result.verdict for result in results(api)] == ["note", "note"]


def test_the_job_is_deleted_if_the_watch_fails(
    api: ClusterClient, cluster: FakeCluster, jobs: list[dict[str, Any]]
) -> None:
    cluster.denied.add(("list", "pods"))
    with pytest.raises(Exception, match="pods"):
        results(api)
    assert len(jobs) == 1
    assert cluster.all("jobs") == []
