"""The launcher on a real cluster: one job whatever happens to the launcher, and one-line errors."""

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from podscale.kubernetes.cluster_doctor import PERMISSION_RULES
from tests.cluster.cluster import Cluster
from tests.cluster.launcher import Launcher
from tests.cluster.training import steps

pytestmark = pytest.mark.timeout(900)
PYTORCHJOB = ("kubeflow.org/v1", "PyTorchJob")
LONG = "train.epochs=500"  # ends only on request, even if the machine is slow


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory, cluster: Cluster, namespace: str, image: str) -> None:
    """Shard set of all runs in this module."""
    ended = Launcher(tmp_path_factory.mktemp("shards"), namespace, image, "shards").command("submit", "--stage=shard")
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.fixture
def folder(tmp_path: Path, shards: None) -> Path:
    return tmp_path


def jobs(cluster: Cluster, namespace: str) -> list[str]:
    return [job["metadata"]["uid"] for job in cluster.all_of(namespace, *PYTORCHJOB)]


def step_text(number: int) -> str:
    """Return the text of a step in rank 0's log."""
    return f'"step": {number},'


@pytest.mark.cluster_ci
def test_a_killed_launcher_comes_back_to_its_job_and_a_deleted_pod_costs_no_line(
    cluster: Cluster, namespace: str, image: str, folder: Path
) -> None:
    launcher = Launcher(folder, namespace, image, "adopted", "train.epochs=40")  # long enough for the disturbance
    first = launcher.start("submit", "--stage=train")
    first.sees(cluster, step_text(25))
    first.process.kill()
    first.end()
    before = jobs(cluster, namespace)

    second = launcher.start("submit", "--stage=train")
    second.sees(cluster, step_text(45))
    cluster.kill(namespace, "adopted-worker-0")
    assert second.end() == 0, second.text
    assert jobs(cluster, namespace) == before
    lines = [line for line in second.text.splitlines() if line.startswith("{")]
    assert len(set(lines)) == len(lines)
    (total_steps,) = {json.loads(line)["total_steps"] for line in lines if '"total_steps"' in line}
    assert set(steps(second.text)) == set(range(1, total_steps + 1))

    again = launcher.command("submit", "--stage=train")
    assert again.returncode == 0, again.stderr
    assert jobs(cluster, namespace) == before, "a job that has succeeded is not made again"


@pytest.mark.cluster_ci
def test_two_submitters_at_once_make_one_job_which_stop_ends(
    cluster: Cluster, namespace: str, image: str, folder: Path
) -> None:
    launcher = Launcher(folder, namespace, image, "twice", LONG)
    both = [launcher.start("submit", "--stage=train", "--no-wait") for _ in range(2)]
    assert [one.end() for one in both] == [0, 0]
    waiting = launcher.start("submit", "--stage=train")
    assert len(cluster.all_of(namespace, *PYTORCHJOB)) == len(jobs(cluster, namespace))
    named = [job["metadata"]["name"] for job in cluster.all_of(namespace, *PYTORCHJOB)]
    assert named.count("twice") == 1
    waiting.sees(cluster, step_text(1))
    status = json.loads(launcher.command("status", "--json").stdout)
    assert [(job["phase"], job["running"]) for job in status] == [("running", 2)]

    assert launcher.command("stop").returncode == 0
    assert waiting.end() == 1
    assert "podscale: PyTorchJob twice: " in waiting.text
    assert cluster.pods(namespace, "podscale.dev/run=twice") == []
    again = launcher.command("stop")
    assert (again.returncode, "run twice" in again.stdout) == (0, True), "nothing is left to stop"


def test_a_request_to_stop_leaves_the_job_or_takes_it_along(
    cluster: Cluster, namespace: str, image: str, folder: Path
) -> None:
    launcher = Launcher(folder, namespace, image, "asked", LONG)
    for options, jobs_left in (((), 1), (("--stop-on-signal",), 0)):
        waiting = launcher.start("submit", "--stage=train", *options)
        waiting.sees(cluster, "PyTorchJob asked: ")
        waiting.process.send_signal(signal.SIGTERM)
        assert waiting.end() == 75, waiting.text
        at_work = [job for job in cluster.all_of(namespace, *PYTORCHJOB) if job["metadata"]["name"] == "asked"]
        assert sum("deletionTimestamp" not in job["metadata"] for job in at_work) == jobs_left


def test_bad_input_ends_the_job_and_prints_the_error_of_the_stage(
    cluster: Cluster, namespace: str, image: str, folder: Path
) -> None:
    launcher = Launcher(folder, namespace, image, "wrong")
    ended = launcher.command("submit", "--stage=train", "--shard-set=/workspace/datasets/absent")
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert "/workspace/datasets/absent" in ended.stderr
    assert "PyTorchJob wrong" in ended.stdout
    cluster.wait("the job to be gone", lambda: "wrong" not in launcher.command("list").stdout, poll=1)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (("launch.image=localhost/absent:1", "launch.cluster.image_pull_policy=Never"), "ErrImageNeverPull"),
        (("launch.resources.cpus=1000",), "Insufficient cpu"),
    ],
    ids=["an image that is not there", "more than any node has"],
)
def test_status_reports_why_pods_do_not_start(
    cluster: Cluster, namespace: str, image: str, folder: Path, settings: tuple[str, ...], reason: str
) -> None:
    launcher = Launcher(folder, namespace, image, "stuck", *settings)
    assert launcher.command("submit", "--stage=train", "--no-wait").returncode == 0
    cluster.wait(reason, lambda: reason in launcher.command("status").stdout, poll=2)
    launcher.command("stop")


def test_a_quota_refuses_the_job_before_anything_is_made(cluster: Cluster, image: str, folder: Path) -> None:
    with cluster.namespace("quota") as namespace:
        quota = {"metadata": {"name": "none"}, "spec": {"hard": {"count/pytorchjobs.kubeflow.org": "0"}}}
        cluster.core.create_namespaced_resource_quota(namespace, quota)
        launcher = Launcher(folder, namespace, image, "many")
        cluster.wait("the quota", lambda: cluster.core.read_namespaced_resource_quota("none", namespace).status.hard)
        ended = launcher.command("submit", "--stage=train")
        assert (ended.returncode, "exceeded quota: none" in ended.stderr) == (2, True), ended.stderr
        assert cluster.all_of(namespace, "networking.k8s.io/v1", "NetworkPolicy") == []


@pytest.mark.parametrize(
    ("hard", "reason"),
    [
        ({"requests.cpu": "300m", "requests.memory": "8Gi", "limits.cpu": "64", "limits.memory": "256Gi"}, ""),
        ({"requests.cpu": "100m"}, "launch.resources.cpus"),
    ],
    ids=["room for the shard stage", "no room for one pod"],
)
def test_a_quota_on_cores_admits_the_default_request_or_is_reported_once(
    cluster: Cluster, image: str, folder: Path, hard: dict[str, str], reason: str
) -> None:
    with cluster.namespace("cores") as namespace:
        quota = {"metadata": {"name": "cores"}, "spec": {"hard": hard}}
        cluster.core.create_namespaced_resource_quota(namespace, quota)
        cluster.wait("the quota", lambda: cluster.core.read_namespaced_resource_quota("cores", namespace).status.hard)
        launcher = Launcher(folder, namespace, image, "cores", "launch.resources={}")
        if not reason:
            ended = launcher.command("submit", "--stage=shard")
            assert ended.returncode == 0, ended.stdout + ended.stderr
            return
        waiting = launcher.start("submit", "--stage=train")
        waiting.sees(cluster, "exceeded quota: cores", reason)
        time.sleep(30)  # the operator tries again, for both pods
        waiting.process.send_signal(signal.SIGTERM)
        waiting.end()
        assert waiting.text.count("exceeded quota: cores") == 1, waiting.text
        report = json.loads(launcher.command("doctor", "--cluster", "--json").stdout)
        assert {"quota cores"} == {line["subject"] for line in report if line["verdict"] == "missing"}


def test_missing_objects_of_later_stages_are_found_before_the_first(cluster: Cluster, image: str, folder: Path) -> None:
    absent = ("launch.cluster.workspace_claim=absent", "launch.cluster.service_account=absent")
    with cluster.namespace("early") as namespace:
        ended = Launcher(folder, namespace, image, "early", *absent).command("submit")
        assert ended.returncode == 2
        assert "launch.cluster.workspace_claim" in ended.stderr
        assert "launch.cluster.service_account" in ended.stderr
        assert cluster.all_of(namespace, "batch/v1", "Job") == []


@pytest.fixture
def account(cluster: Cluster, namespace: str, tmp_path: Path) -> Iterator[Path]:
    """Kubeconfig of a service account without any rights."""
    cluster.core.create_namespaced_service_account(namespace, {"metadata": {"name": "limited"}})
    token = cluster.core.create_namespaced_service_account_token("limited", namespace, {"spec": {}}).status.token
    configuration = cluster.api.configuration
    server = {"server": configuration.host, "certificate-authority": configuration.ssl_ca_cert}
    content = {
        "clusters": [{"name": "c", "cluster": server}],
        "users": [{"name": "u", "user": {"token": token}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    path = tmp_path / "limited"
    path.write_text(yaml.safe_dump(content))
    yield path
    cluster.core.delete_namespaced_service_account("limited", namespace)


def test_the_documented_permissions_suffice_and_without_them_the_error_names_rbac(
    cluster: Cluster, namespace: str, image: str, folder: Path, account: Path
) -> None:
    launcher = Launcher(folder, namespace, image, "limited", "train.epochs=2")
    refused = launcher.command("submit", "--stage=train", "--defaults=/dev/null", kubeconfig=account)
    assert (refused.returncode, "(RBAC)" in refused.stderr) == (2, True), refused.stderr
    allow(cluster, namespace)
    ended = launcher.command("submit", "--stage=train", kubeconfig=account)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert len(steps(ended.stdout)) >= 22
    stopped = launcher.command("stop", "--delete", kubeconfig=account)
    assert stopped.returncode == 0, stopped.stderr


def allow(cluster: Cluster, namespace: str) -> None:
    """Create a role with exactly the rights of the table, bound to the account."""
    rules: list[dict[str, Any]] = [
        {"apiGroups": [rule.group], "resources": [rule.resource], "verbs": list(rule.verbs)}
        for rule in PERMISSION_RULES
    ]
    role = {"apiVersion": "rbac.authorization.k8s.io/v1", "metadata": {"name": "limited"}}
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "limited"}
    subject = {"kind": "ServiceAccount", "name": "limited", "namespace": namespace}
    cluster.create(namespace, {**role, "kind": "Role", "rules": rules})
    cluster.create(namespace, {**role, "kind": "RoleBinding", "roleRef": reference, "subjects": [subject]})


def test_a_namespace_deleted_under_the_launcher_is_one_message(cluster: Cluster, image: str, folder: Path) -> None:
    with cluster.namespace("doomed") as namespace:
        launcher = Launcher(folder, namespace, image, "doomed", "launch.resources.cpus=1000")
        waiting = launcher.start("submit", "--stage=train")
        waiting.sees(cluster, "Insufficient cpu")
        cluster.core.delete_namespace(namespace)
        assert waiting.end() == 1, waiting.text
        assert f"podscale: namespace {namespace}: " in waiting.text


def test_the_examination_finds_nothing_missing(cluster: Cluster, namespace: str, image: str, folder: Path) -> None:
    report = json.loads(Launcher(folder, namespace, image, "examined").command("doctor", "--cluster", "--json").stdout)
    assert [line for line in report if line["verdict"] == "missing"] == []
    assert {"API server", "kind PyTorchJob", "permissions", "the job itself"} <= {line["subject"] for line in report}
    assert {line["verdict"] for line in report if line["subject"] == f"image {image}"} == {"ok"}


def test_the_examination_finds_an_image_that_cannot_be_pulled(
    cluster: Cluster, namespace: str, image: str, folder: Path
) -> None:
    absent = "localhost/absent:1"
    launcher = Launcher(folder, namespace, image, "examined", f"launch.image={absent}")
    report = json.loads(launcher.command("doctor", "--cluster", "--json").stdout)
    assert {line["verdict"] for line in report if line["subject"] == f"image {absent}"} == {"missing"}

    def checks() -> list[str]:
        names = [job["metadata"]["name"] for job in cluster.all_of(namespace, "batch/v1", "Job")]
        return [name for name in names if name.startswith("podscale-image-check")]

    cluster.wait("the end of the check's Job", lambda: not checks())
