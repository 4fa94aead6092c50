"""The chart on a real cluster with the real Helm, in namespaces that enforce Pod Security "restricted"."""

import itertools
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.cluster import Cluster
from tests.cluster.release import PROFILE, install, kubectl, uninstall
from tests.cluster.training import DIGITS
from tests.support import helm

pytestmark = pytest.mark.timeout(900)
# Kubernetes' own objects in every namespace, and the fixture's claim
LEFT = {"configmap/kube-root-ca.crt", "serviceaccount/default", "persistentvolumeclaim/workspace"}


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    """New namespace for each test, because most tests install the chart."""
    with cluster.namespace("chart") as name:
        yield name


@pytest.fixture
def other_namespace(cluster: Cluster) -> Iterator[str]:
    with cluster.namespace("chart-other") as name:
        yield name


@pytest.fixture(scope="module")
def shared(cluster: Cluster, images: dict[str, str]) -> Iterator[str]:
    """Namespace with the chart installed, for read-only tests."""
    with cluster.namespace("chart-shared") as name:
        install(name, images=images)
        yield name


@pytest.fixture(scope="module")
def images(image: str, launcher_image: str) -> dict[str, str]:
    """Values with the images of the chart's pods."""
    return {"train": image, "launcher": launcher_image, "test": image}


def everything_in(namespace: str) -> set[str]:
    """Return kind/name of every object in the namespace except events."""
    kinds = kubectl("api-resources", "--verbs=list", "--namespaced", "-o", "name").split()
    listed = ",".join(kind for kind in kinds if not kind.startswith("events"))
    objects = json.loads(kubectl("get", listed, "--namespace", namespace, "-o", "json"))
    return {f"{item['kind'].lower()}/{item['metadata']['name']}" for item in objects["items"]}


def get(namespace: str, *what: str) -> Any:
    return json.loads(kubectl("get", *what, "--namespace", namespace, "-o", "json"))


@pytest.mark.cluster_ci
def test_install_prepares_the_namespace(shared: str) -> None:
    claim = get(shared, "persistentvolumeclaim", "podscale-workspace")
    assert claim["status"]["phase"] == "Bound"
    document = yaml.safe_load(get(shared, "configmap", "podscale-defaults")["data"]["defaults.yaml"])
    assert document["launch"]["cluster"]["namespace"] == shared
    assert {"podscale-deny", "podscale-kubernetes-api"} <= {
        item["metadata"]["name"] for item in get(shared, "networkpolicies")["items"]
    }


def test_everything_the_chart_can_make_is_accepted(namespace: str) -> None:
    """The API server validates strictly: unknown fields and wrong values are errors. Nothing is created."""
    served = kubectl("api-versions").split()
    objects = helm.template(None, helm.EVERYTHING, namespace=namespace)
    rendered = [item for item in objects if item["apiVersion"] in served]
    accounts = helm.kinds(rendered, "ServiceAccount")
    apply(accounts)  # a pod is rejected while its account is missing, also in a dry run
    others = [item for item in rendered if item not in accounts]
    assert len(others) > 18
    apply(others, "--dry-run=server", "--validate=strict")


def apply(objects: list[dict[str, Any]], *options: str) -> None:
    command = ["kubectl", "create", *options, "-f", "-"]
    done = subprocess.run(command, input=yaml.safe_dump_all(objects), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "would violate PodSecurity" not in done.stderr


def helm_test(namespace: str) -> tuple[str, str]:
    """Return the final phase of the pod of `helm test` and its log, before a successful pod is deleted."""
    command = [helm.program(), "test", "podscale", "--namespace", namespace, "--timeout", "15m"]
    done = subprocess.run(command, capture_output=True, text=True)
    phase = done.stdout.partition("Phase:")[2].split(maxsplit=1)[0]
    assert (done.returncode == 0) == (phase == "Succeeded"), done.stdout + done.stderr
    return phase, "" if phase == "Succeeded" else kubectl("logs", "podscale-test-training", "--namespace", namespace)


def test_a_daemonset_pulls_the_images_ahead_of_runs(namespace: str, images: dict[str, str]) -> None:
    """Each node has a running pod whose init containers used the images and ended."""
    install(namespace, images=images | {"prePull": {"enabled": True}})
    kubectl("rollout", "status", "daemonset/podscale-pre-pull", "--timeout=120s", "--namespace", namespace)
    pods = get(namespace, "pods", "--selector", "app.kubernetes.io/component=pre-pull")["items"]
    assert len(pods) == get(namespace, "daemonset", "podscale-pre-pull")["status"]["desiredNumberScheduled"] > 0
    for pod in pods:
        status = pod["status"]
        assert [one["image"] for one in pod["spec"]["initContainers"]] == [images["train"]]
        assert [one["state"]["terminated"]["exitCode"] for one in status["initContainerStatuses"]] == [0]
        assert "running" in status["containerStatuses"][0]["state"]


@pytest.mark.cluster_ci
def test_helm_test_trains_and_scrapes(shared: str) -> None:
    """The pod checks its own training and metrics endpoint (charts/podscale/files/check_training.py)."""
    phase, log = helm_test(shared)
    assert phase == "Succeeded", log


def test_helm_test_fails_where_the_image_cannot_train(namespace: str, images: dict[str, str]) -> None:
    """The launcher image can shard the digits but has no framework."""
    install(namespace, images=images | {"test": images["launcher"]})
    phase, log = helm_test(namespace)
    assert phase == "Failed"
    assert "the PyTorch engine needs torch" in log
    assert re.search(r"`podscale train` .*\bexit code 2\b", log)
    assert "Traceback" not in log


def test_helm_test_fails_where_training_does_not_learn(namespace: str, images: dict[str, str], tmp_path: Path) -> None:
    """Only the learning rate is wrong."""
    chart = shutil.copytree(helm.CHART, tmp_path / "podscale")
    check = chart / "files" / "check_training.py"
    text = check.read_text(encoding="utf-8")
    begin = "CHANGES = {\n"
    assert begin in text
    check.write_text(text.replace(begin, f'{begin}    "train.schedule.learning_rate": "1e-9",\n'), encoding="utf-8")
    install(namespace, chart, images=images)
    phase, log = helm_test(namespace)
    assert phase == "Failed"
    assert re.search(r"top-1 accuracy: below 0\.9 \(got 0\.\d+\)\. Training does not work in this image", log), log


@pytest.mark.parametrize("role", ["launcher", "trainer", "uploader"])
def test_accounts_may_do_what_the_chart_says_and_no_more(shared: str, role: str) -> None:
    granted = [asked for rule in get(shared, "role", "podscale-launcher")["rules"] for asked in spelled(rule)]
    others = [
        {"verb": "get", "group": "", "resource": "secrets"},
        {"verb": "get", "group": "", "resource": "configmaps", "name": "another"},
        {"verb": "create", "group": "", "resource": "pods"},
        {"verb": "create", "group": "", "resource": "pods", "subresource": "exec"},
        {"verb": "delete", "group": "", "resource": "namespaces"},
    ]
    allowed = [role == "launcher"] * len(granted) + [False] * len(others)
    assert may(shared, role, [*granted, *others]) == allowed


def spelled(rule: dict[str, Any]) -> Iterator[dict[str, str]]:
    """Return every request that a Role's rule allows, as fields of an access review."""
    for group, resource, verb in itertools.product(rule["apiGroups"], rule["resources"], rule["verbs"]):
        resource, _, part = resource.partition("/")
        asked = {"verb": verb, "group": group, "resource": resource}
        for name in rule.get("resourceNames", [""]):
            yield asked | ({"subresource": part} if part else {}) | ({"name": name} if name else {})


def may(namespace: str, role: str, requests: list[dict[str, str]]) -> list[bool]:
    """Ask the API server if the account of a role is allowed each of these requests."""
    reviews = [
        {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {
                "user": f"system:serviceaccount:{namespace}:podscale-{role}",
                "resourceAttributes": {"namespace": namespace, **asked},
            },
        }
        for asked in requests
    ]
    command = ["kubectl", "create", "-o", "jsonpath={.status.allowed}{'\\n'}", "-f", "-"]
    done = subprocess.run(command, input=yaml.safe_dump_all(reviews), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [line == "true" for line in done.stdout.split()]


def test_pods_that_are_not_restricted_are_refused(shared: str) -> None:
    done = subprocess.run(
        ["kubectl", "run", "root", "--image=localhost/none", "--namespace", shared], capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "violates PodSecurity" in done.stderr


def test_upgrade_with_other_values(namespace: str) -> None:
    install(namespace)
    uid = get(namespace, "persistentvolumeclaim", "podscale-workspace")["metadata"]["uid"]
    install(namespace, command="upgrade", metrics={"provider": "none"}, networkPolicy={"ranks": "namespace"},
            resourceQuota={"pods": 50}, defaults={"launch": {"nodes": 2}})  # fmt: skip
    assert get(namespace, "resourcequota", "podscale")["spec"]["hard"] == {"pods": "50"}
    assert "Ingress" in get(namespace, "networkpolicy", "podscale-ranks")["spec"]["policyTypes"]
    document = yaml.safe_load(get(namespace, "configmap", "podscale-defaults")["data"]["defaults.yaml"])
    assert document["launch"]["nodes"] == 2
    assert get(namespace, "persistentvolumeclaim", "podscale-workspace")["metadata"]["uid"] == uid


def former_chart(folder: Path) -> Path:
    """Return a copy of the chart like an earlier version: another version number, one policy less, no account name."""
    chart = shutil.copytree(helm.CHART, folder / "podscale")
    metadata = yaml.safe_load((chart / "Chart.yaml").read_text(encoding="utf-8"))
    (chart / "Chart.yaml").write_text(
        yaml.safe_dump(metadata | {"version": "0.0.9", "appVersion": "0.0.9"}), encoding="utf-8"
    )
    (chart / "templates" / "networkpolicies.yaml").unlink()
    return Path(chart)


def test_upgrade_from_a_former_version(namespace: str, tmp_path: Path) -> None:
    """Also with a direct run, whose Job is immutable."""
    run = {"enabled": True, "document": {"run": {"id": "digits"}}}
    pinned = {"tag": "dev"}  # otherwise the new version's images would create another Job, as a new document does
    install(namespace, former_chart(tmp_path), directRun=run, images=pinned)
    assert get(namespace, "networkpolicies")["items"] == []
    before = get(namespace, "jobs")["items"]
    install(namespace, command="upgrade", directRun=run, images=pinned)
    after = get(namespace, "jobs")["items"]
    assert [item["metadata"]["name"] for item in before] == [item["metadata"]["name"] for item in after]
    assert after[0]["metadata"]["labels"]["helm.sh/chart"] != before[0]["metadata"]["labels"]["helm.sh/chart"]
    policies = {item["metadata"]["name"] for item in get(namespace, "networkpolicies")["items"]}
    rendered = helm.template(PROFILE, {"directRun": run, "images": pinned}, namespace=namespace)
    assert policies == {item["metadata"]["name"] for item in helm.kinds(rendered, "NetworkPolicy")} != set()
    install(namespace, command="upgrade", directRun=run | {"document": {"run": {"id": "digits", "seed": 3}}})
    assert len(get(namespace, "jobs")["items"]) == 1


def ended(cluster: Cluster, namespace: str, job: str) -> dict[str, Any]:
    """Return the status of a Job that is complete or failed, else None."""

    def status() -> dict[str, Any] | None:
        job_status: dict[str, Any] = get(namespace, "job", job)["status"]
        return (
            job_status if {"Complete", "Failed"} & {one["type"] for one in job_status.get("conditions", ())} else None
        )

    job_status: dict[str, Any] = cluster.wait(f"the end of {job}", status, seconds=800, poll=2)
    return job_status


def test_bad_input_ends_a_direct_run_at_the_first_pod(cluster: Cluster, namespace: str, images: dict[str, str]) -> None:
    """The document passes the chart's schema and is rejected by a check across its sections."""
    document = {"run": {"id": "digits"}, "train": {"epochs": 1, "schedule": {"warmup_epochs": 2}}}
    install(namespace, images=images, directRun={"enabled": True, "document": document})
    (job,) = get(namespace, "jobs")["items"]
    status = ended(cluster, namespace, job["metadata"]["name"])
    assert status["failed"] == 1
    assert {one["type"]: one.get("reason") for one in status["conditions"]}["Failed"] == "PodFailurePolicy"


def test_a_direct_run_goes_from_images_to_report(cluster: Cluster, namespace: str, images: dict[str, str]) -> None:
    """The launcher's account, its Role and podscale-defaults suffice: a PyTorchJob of two pods trains the digits."""
    document = yaml.safe_load(DIGITS)
    document["launch"]["resources"].update(memory_gib=1.5)
    document["train"]["epochs"] = 4
    del document["launch"]["cluster"], document["run"]["workspace"]
    install(namespace, images=images, directRun={"enabled": True, "document": document})
    (job,) = get(namespace, "jobs")["items"]

    status = ended(cluster, namespace, job["metadata"]["name"])
    log = kubectl("logs", "--selector", f"job-name={job['metadata']['name']}", "--tail=-1", "--namespace", namespace)
    assert status.get("succeeded") == 1, log
    assert "report" in log
    (trained,) = get(namespace, "pytorchjobs.kubeflow.org")["items"]
    assert trained["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"] == 2


def test_two_releases_in_two_namespaces(namespace: str, other_namespace: str) -> None:
    priority = [{"name": "urgent", "value": 1000}]
    for name in (namespace, other_namespace):
        install(name, priorityClasses=priority)
    names = kubectl("get", "priorityclasses", "-l", "app.kubernetes.io/name=podscale", "-o", "name").split()
    assert {f"priorityclass.scheduling.k8s.io/{name}.podscale-urgent" for name in (namespace, other_namespace)} <= set(
        names
    )
    uninstall(namespace)
    assert "podscale-launcher" in kubectl("get", "role", "--namespace", other_namespace)
    uninstall(other_namespace)
    left = kubectl("get", "priorityclasses", "-l", "app.kubernetes.io/name=podscale", "-o", "name")
    assert namespace not in left
    assert other_namespace not in left


def test_a_second_release_in_one_namespace_is_refused(shared: str) -> None:
    done = helm.run("install", "second", helm.CHART, "--namespace", shared, "-f", PROFILE)
    assert done.returncode != 0
    assert "podscale-defaults" in done.stderr


@pytest.mark.cluster_ci
@pytest.mark.parametrize(("keep", "left"), [(True, {"persistentvolumeclaim/podscale-workspace"}), (False, set())])
def test_uninstall_leaves_what_it_says(namespace: str, keep: bool, left: set[str]) -> None:
    install(namespace, workspace={"keep": keep})
    uninstall(namespace)
    kubectl("wait", "--for=delete", "pods", "--all", "--namespace", namespace, "--timeout=60s")
    if not keep:
        kubectl("wait", "--for=delete", "pvc/podscale-workspace", "--namespace", namespace, "--timeout=60s")
    assert everything_in(namespace) - LEFT == left


def test_wrong_values_create_nothing(namespace: str) -> None:
    done = helm.run("install", "podscale", helm.CHART, "--namespace", namespace, values={"kueue": {"enabled": True}})
    assert done.returncode != 0
    assert "kueue.clusterQueue" in done.stderr or "install Kueue" in done.stderr
    assert everything_in(namespace) - LEFT == set()


def installer_role(namespace: str) -> dict[str, Any]:
    """Return a Role for all that the chart makes in a namespace, monitors of Prometheus's operator included."""
    kinds = {
        "": ["configmaps", "serviceaccounts", "secrets", "persistentvolumeclaims", "pods"],
        "rbac.authorization.k8s.io": ["roles", "rolebindings"],
        "networking.k8s.io": ["networkpolicies"],
        "monitoring.coreos.com": ["podmonitors", "prometheusrules"],
    }
    rules = [{"apiGroups": [group], "resources": names, "verbs": ["*"]} for group, names in kinds.items()]
    metadata = {"name": "installer", "namespace": namespace}
    return {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": metadata, "rules": rules}


def test_an_installer_with_rights_in_the_namespace_alone_can_install(namespace: str) -> None:
    """Helm's `lookup` fails without the right to read an object, so the chart looks up nothing."""
    account = f"system:serviceaccount:{namespace}:installer"
    kubectl("create", "serviceaccount", "installer", "--namespace", namespace)
    apply([installer_role(namespace)])
    binding = ("rolebinding", "installer", "--role=installer", f"--serviceaccount={namespace}:installer")
    kubectl("create", *binding, "--namespace", namespace)
    options = ("--namespace", namespace, "-f", PROFILE, "--kube-as-user", account)
    done = helm.run("install", "podscale", helm.CHART, *options, values={})
    assert done.returncode == 0, done.stderr
    uninstall(namespace)
