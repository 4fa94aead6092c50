"""Two teams with a release each and its policy: runs of the one train, and the other cannot reach them.

tests/chart/test_cluster_policy.py has the policy's cases on an API server without nodes; here the operators and the
controllers create the objects that it checks.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes.client.exceptions import ApiException

from tests.cluster.cluster import Cluster
from tests.cluster.launcher import Launcher
from tests.cluster.release import install, kubectl
from tests.cluster.training import Training

pytestmark = pytest.mark.timeout(900)
LONG = "train.epochs=500"  # ends only on request, even if the machine is slow
OPERATORS = {"pytorchjob": "kubeflow.org", "jobset": "jobset.x-k8s.io", "trainjob": "trainer.kubeflow.org"}


def policy(image: str) -> dict[str, Any]:
    """Return the strictest policy that the digits satisfy, for all objects of the namespace."""
    admission = {"enabled": True, "scope": "namespace"}
    registry = image.rpartition("/")[0]
    return {"contact": "ml@example.org", "images": [registry], "security": "restricted", "maxHours": 168,
            "maxAccelerators": 8, "admission": admission}  # fmt: skip


@pytest.fixture(scope="module")
def team(cluster: Cluster, image: str, launcher_image: str) -> Iterator[str]:
    yield from installed(cluster, "team-a", image, launcher_image)


@pytest.fixture(scope="module")
def other_team(cluster: Cluster, image: str, launcher_image: str) -> Iterator[str]:
    yield from installed(cluster, "team-b", image, launcher_image)


def installed(cluster: Cluster, name: str, image: str, launcher_image: str) -> Iterator[str]:
    """Yield a namespace with a release whose policy is in force."""
    images = {"train": image, "launcher": launcher_image, "test": image}
    with cluster.namespace(name) as namespace:
        install(namespace, images=images, policy=policy(image), priorityClasses=[{"name": "urgent", "value": 10}])
        # Pod Security refuses a pod before the policy does, but not a Job.
        template = {"spec": {"restartPolicy": "Never", "containers": [{"name": "x", "image": "docker.io/x"}]}}
        metadata = {"name": "x", "namespace": namespace}
        bare = {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": {"template": template}}
        cluster.wait("the policy", lambda: "launch.image: " in dry_run(cluster, namespace, bare))
        yield namespace


def dry_run(cluster: Cluster, namespace: str, manifest: dict[str, Any]) -> str:
    """Return the API server's message against the creation of an object; empty if it accepts it."""
    resource = cluster.dynamic.resources.get(api_version=manifest["apiVersion"], kind=manifest["kind"])
    try:
        resource.create(manifest, namespace=namespace, query_params=[("dryRun", "All")])
    except ApiException as error:
        return str(json.loads(error.body)["message"])
    return ""


@pytest.fixture
def shards(cluster: Cluster, team: str, image: str, tmp_path: Path) -> str:
    """Namespace with the shard set of all runs in this module."""
    ended = Launcher(tmp_path, team, image, "shards").command("submit", "--stage=shard")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return team


def test_expressions_of_the_policies_have_correct_types(cluster: Cluster, team: str) -> None:
    """The controller manager checks them against the schemas of the kinds that the cluster serves."""

    def checked() -> list[Any]:
        items = json.loads(kubectl("get", "validatingadmissionpolicies", "-o", "json"))["items"]
        ours = [item for item in items if item["metadata"]["name"].startswith(f"{team}.")]
        is_observed = [item.get("status", {}).get("observedGeneration") for item in ours]
        return ours if ours and all(is_observed) else []

    for item in cluster.wait("the type check", checked):
        assert item["status"]["typeChecking"].get("expressionWarnings") is None, item["metadata"]["name"]


@pytest.mark.cluster_ci
def test_an_allowed_run_trains_and_another_image_is_refused(
    cluster: Cluster, shards: str, image: str, tmp_path: Path
) -> None:
    """The operator's pods pass the policy, which holds for all pods of the namespace."""
    ended = Launcher(tmp_path, shards, image, "allowed", "train.epochs=2").command("submit", "--stage=train")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    refused = Launcher(tmp_path, shards, "docker.io/x:1", "refused").command("submit", "--stage=train", "--no-wait")
    assert refused.returncode == 2
    assert refused.stderr.startswith("podscale: launch.image: ")
    assert "ml@example.org" in refused.stderr


@pytest.mark.parametrize(
    "backend",
    [pytest.param(name, marks=pytest.mark.cluster_full(group)) for name, group in OPERATORS.items()],
)
def test_objects_of_the_operators_pass_the_policy(cluster: Cluster, shards: str, image: str, backend: str) -> None:
    """A TrainJob makes a JobSet, which makes Jobs, which make pods; none of them is refused."""
    training = Training(cluster, shards, image, f"by-{backend}", backend, "train.epochs=2")
    cluster.wait(f"the end of {backend}", training.ended)
    assert {"Succeeded", "Completed", "Complete"} & set(training.conditions()), training.describe()


def credentials(cluster: Cluster, namespace: str, path: Path) -> Path:
    """Write the kubeconfig of the launcher's account of a release."""
    answer = cluster.core.create_namespaced_service_account_token("podscale-launcher", namespace, {"spec": {}})
    configuration = cluster.api.configuration
    server = {"server": configuration.host, "certificate-authority": configuration.ssl_ca_cert}
    content = {
        "clusters": [{"name": "c", "cluster": server}],
        "users": [{"name": "u", "user": {"token": answer.status.token}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": namespace}}],
        "current-context": "x",
    }
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


@pytest.mark.cluster_ci
def test_the_other_team_neither_sees_nor_stops_a_run(
    cluster: Cluster, shards: str, other_team: str, image: str, tmp_path: Path
) -> None:
    """All commands are tried while the run trains; with the own account they work."""
    launcher = Launcher(tmp_path, shards, image, "guarded", LONG)
    own, other = (credentials(cluster, name, tmp_path / name) for name in (shards, other_team))
    assert launcher.command("submit", "--stage=train", "--no-wait", kubeconfig=own).returncode == 0
    cluster.wait("two running pods", lambda: running(cluster, shards) == 2)
    before = [pod.metadata.uid for pod in cluster.pods(shards, "podscale.dev/run=guarded")]
    for command in (["status"], ["logs"], ["stop", "--no-wait"], ["stop", "--delete", "--no-wait"], ["list"]):
        ended = launcher.command(*command, kubeconfig=other)
        assert ended.returncode == 2, command
        assert "RBAC" in ended.stderr
        assert "guarded" not in ended.stdout
    intruder = Launcher(tmp_path, shards, image, "intruder").command("submit", "--stage=train", kubeconfig=other)
    assert intruder.returncode == 2
    assert [pod.metadata.uid for pod in cluster.pods(shards, "podscale.dev/run=guarded")] == before
    assert launcher.command("status", kubeconfig=own).returncode == 0
    assert launcher.command("stop", "--delete", kubeconfig=own).returncode == 0
    assert "guarded" not in kubectl("get", "pytorchjobs", "--namespace", shards)


def running(cluster: Cluster, namespace: str) -> int:
    pods = cluster.pods(namespace, "podscale.dev/run=guarded")
    return sum(pod.status.phase == "Running" for pod in pods)
