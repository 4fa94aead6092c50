"""Prometheus finds tasks of Kubeflow Pipelines, although their containers declare no ports."""

import re
from pathlib import Path
from typing import Any

import pytest

from podscale.kubernetes.job_spec import METRICS_PORT
from podscale.telemetry.server import MetricsServer
from tests.support import crds, helm
from tests.support.polling import until
from tests.support.prometheus import prometheus

ADDRESS = "127.0.94.64"
TASK = {
    "app.kubernetes.io/name": "podscale",
    "app.kubernetes.io/component": "shard",
    "workflows.argoproj.io/workflow": "podscale-training-x7k2p",
}
CONTAINERS = ("wait", "main", "kfp-launcher")
"""Containers of such a pod; only the second is Podscale's."""


@pytest.fixture(scope="module")
def objects() -> list[dict[str, Any]]:
    return helm.template()


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """Return True if the label selector (with the operators used here) selects a pod with these labels."""
    for expression in selector.get("matchExpressions", ()):
        assert expression["operator"] in ("In", "Exists")
        if expression["key"] not in labels or labels[expression["key"]] not in expression.get(
            "values", labels.values()
        ):
            return False
    return selector["matchLabels"].items() <= labels.items()


@pytest.mark.parametrize("kind", ["PodMonitor", "PodMonitoring"])
def test_those_that_serve_are_chosen(objects: list[dict[str, Any]], kind: str) -> None:
    selector = helm.monitor(objects, kind, "podscale-pipelines")["spec"]["selector"]
    chosen = {
        component: selects(selector, {**TASK, "app.kubernetes.io/component": component})
        for component in ("shard", "train", "evaluate", "report", "launcher")
    }
    assert chosen == {"shard": True, "train": True, "evaluate": True, "report": False, "launcher": False}
    assert not selects(selector, {name: value for name, value in TASK.items() if "argoproj" not in name}), "a job's pod"


def test_they_may_be_reached_where_no_port_has_a_name(objects: list[dict[str, Any]]) -> None:
    (policy,) = [
        item for item in helm.kinds(objects, "NetworkPolicy") if item["metadata"]["name"] == "podscale-metrics"
    ]
    (rule,) = policy["spec"]["ingress"]
    assert {port["port"] for port in rule["ports"]} == {"metrics", METRICS_PORT}


def test_a_real_prometheus_makes_one_target_of_a_pod(objects: list[dict[str, Any]], tmp_path: Path) -> None:
    """The monitor's relabelling, as the operator writes it, applied to the labels that Prometheus discovers."""
    monitor = helm.monitor(objects, "PodMonitor", "podscale-pipelines")
    crds.validate(monitor)
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert not {"port", "portNumber", "targetPort"} & endpoint.keys()  # each keeps only declared ports
    rules = [{snake(name): value for name, value in rule.items()} for rule in endpoint["relabelings"]]
    pod_targets = [
        {"targets": [ADDRESS], "labels": {**meta("pod_ip", ADDRESS), **meta("pod_container_name", container)}}
        for container in CONTAINERS
    ]
    server = MetricsServer(ADDRESS, METRICS_PORT, lambda: b"podscale_shard_shards_total 1\n").start()
    try:
        with prometheus(tmp_path / "data", pod_targets, relabeling=rules) as running:

            def targets() -> list[dict[str, Any]]:
                active: list[dict[str, Any]] = running.get("targets", state="active")["activeTargets"]
                return active

            until(lambda: [target["health"] for target in targets()] == ["up"], 60)
            assert targets()[0]["scrapeUrl"] == f"http://{ADDRESS}:{METRICS_PORT}/metrics"
    finally:
        server.close()


def meta(name: str, value: str) -> dict[str, str]:
    """Return the name of a label from Prometheus' pod discovery."""
    return {f"__meta_kubernetes_{name}": value}


def snake(name: str) -> str:
    """Convert the operator's field name to Prometheus' (sourceLabels to source_labels)."""
    return re.sub("[A-Z]", lambda match: f"_{match[0].lower()}", name)
