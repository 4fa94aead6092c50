"""The chart's monitors, configured by the real Prometheus operator in a real Prometheus."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from podscale.monitoring.rule_files import ALERT_RULES, RECORDING_RULES
from tests.cluster.cluster import Cluster
from tests.cluster.lab import images
from tests.cluster.training import Training
from tests.support import helm

pytestmark = [pytest.mark.timeout(1800), pytest.mark.cluster_full("monitoring.coreos.com")]
NAME = "under-test"
Ask = Callable[..., Any]


@pytest.fixture(scope="module")
def chart(cluster: Cluster, namespace: str) -> None:
    """The chart's monitors and rules, as Helm installs them with the operator's API, and the scraper's namespace."""
    values = {"metrics": {"interval": "5s"}, "networkPolicy": {"monitoringNamespaces": [namespace]}}
    objects = helm.template(helm.CHART / "ci" / "cpu.yaml", values, apis=[helm.OPERATOR], namespace=namespace)
    chosen = [*helm.kinds(objects, "PodMonitor"), *helm.kinds(objects, "PrometheusRule")]
    chosen += [item for item in objects if item["metadata"]["name"] == "podscale-metrics"]
    assert {item["kind"] for item in chosen} == {"PodMonitor", "PrometheusRule", "NetworkPolicy"}
    for item in chosen:
        cluster.create(namespace, item)


@pytest.fixture(scope="module")
def prometheus(cluster: Cluster, namespace: str, chart: None) -> Ask:
    """ask(path, **query) queries a Prometheus that selects every monitor and rule of the namespace."""
    for item in _manifests(namespace, images.of_program("prometheus") if cluster.is_lab else None):
        cluster.create(namespace, item)
    pod = f"prometheus-{NAME}-0"

    def ask(path: str, **query: str) -> Any:
        target = f"/api/v1/namespaces/{namespace}/pods/{pod}:9090/proxy/api/v1/{path}"
        return json.loads(cluster.get_raw(target, **query))["data"]

    ready = f"/api/v1/namespaces/{namespace}/pods/{pod}:9090/proxy/-/ready"
    cluster.wait("Prometheus", lambda: cluster.get_raw(ready), poll=2)
    return ask


def test_the_operator_takes_over_our_rules(cluster: Cluster, prometheus: Ask) -> None:
    expected = {rule.name for rule in (*ALERT_RULES, *RECORDING_RULES)}

    def loaded() -> dict[str, str]:
        groups = prometheus("rules")["groups"]
        health_by_rule = {rule["name"]: rule["health"] for group in groups for rule in group["rules"]}
        return health_by_rule if expected <= {name for name, health in health_by_rule.items() if health == "ok"} else {}

    assert cluster.wait("the rules' first evaluation", loaded, poll=2)


def test_the_metrics_of_every_pod_are_scraped_while_it_trains(
    cluster: Cluster, namespace: str, image: str, prometheus: Ask
) -> None:
    Training(cluster, namespace, image, "scraped", "job", stage="shard").succeed()
    training = Training(cluster, namespace, image, "scraped", "pytorchjob", "train.epochs=16")

    def both_up() -> list[Any]:
        samples = prometheus("query", query='up{container="pytorch"}')["result"]
        return samples if [sample["value"][1] for sample in samples] == ["1", "1"] else []

    assert {sample["metric"]["pod"] for sample in cluster.wait("both targets", both_up, poll=2)} == {
        "scraped-worker-0",
        "scraped-worker-1",
    }
    rate = 'sum by (run) (rate(podscale_train_images_total{run="scraped"}[1m])) > 0'
    (sample,) = cluster.wait("images per second", lambda: prometheus("query", query=rate)["result"], poll=2)
    assert float(sample["value"][1]) > 1
    training.succeed()


def _manifests(namespace: str, image: str | None) -> list[dict[str, Any]]:
    """Return a Prometheus that may only find pods in its own namespace."""
    named = {"metadata": {"name": NAME}}
    find = {"apiGroups": [""], "resources": ["pods", "services", "endpoints"], "verbs": ["get", "list", "watch"]}
    subject = {"kind": "ServiceAccount", "name": NAME, "namespace": namespace}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": NAME}
    user = {"runAsNonRoot": True, "runAsUser": 65532, "runAsGroup": 65532, "fsGroup": 65532}
    resource = {
        **({"image": image} if image else {}),
        "version": "v3.7.3",
        "serviceAccountName": NAME,
        "podMonitorSelector": {},
        "ruleSelector": {},
        "evaluationInterval": "5s",
        "securityContext": user | {"seccompProfile": {"type": "RuntimeDefault"}},
        "resources": {"requests": {"memory": "128Mi"}},
    }
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", **named},
        {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", **named, "rules": [find]},
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "RoleBinding",
            **named,
            "subjects": [subject],
            "roleRef": role,
        },
        {"apiVersion": "monitoring.coreos.com/v1", "kind": "Prometheus", **named, "spec": resource},
    ]
