"""The chart's dashboards: ConfigMaps that Grafana's sidecar finds, within Kubernetes' size limit."""

import json
from typing import Any

import pytest

from tests.support import helm

FILES = sorted(path.name for path in (helm.CHART / "dashboards").glob("*.json"))


def configmaps(**dashboards: Any) -> list[dict[str, Any]]:
    values = {"metrics": {"dashboards": {"enabled": True, **dashboards}, "runbooks": "https://wiki.example/runbooks"}}
    objects = helm.kinds(helm.template(values=values), "ConfigMap")
    return [one for one in objects if one["metadata"]["name"].endswith("-dashboard")]


def test_no_dashboard_is_installed_unasked() -> None:
    objects = helm.kinds(helm.template(values={}), "ConfigMap")
    assert not [one for one in objects if any(name.endswith(".json") for name in one.get("data", {}))]


def test_every_dashboard_becomes_a_configmap_with_label_and_folder() -> None:
    objects = configmaps()
    assert sorted(name for one in objects for name in one["data"]) == FILES
    assert len({one["metadata"]["name"] for one in objects}) == len(FILES)
    for one in objects:
        assert one["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert one["metadata"]["annotations"] == {"grafana_folder": "Podscale"}
        assert one["metadata"]["namespace"] == "podscale"
        ((name, text),) = one["data"].items()
        assert len(text.encode()) < 1 << 20
        committed = (helm.CHART / "dashboards" / name).read_text(encoding="utf-8")
        assert text == committed.replace("@runbooks@", "https://wiki.example/runbooks/").rstrip("\n")
        assert json.loads(text)["links"][1]["url"] == "https://wiki.example/runbooks/"


def test_label_annotation_and_namespace_are_values() -> None:
    chosen = {
        "namespace": "monitoring",
        "label": "vendor.example/dashboard",
        "labelValue": "true",
        "folderAnnotation": "k8s-sidecar-target-directory",
        "folder": "/tmp/dashboards/Podscale",
    }
    for one in configmaps(**chosen):
        assert one["metadata"]["namespace"] == "monitoring"
        assert one["metadata"]["labels"]["vendor.example/dashboard"] == "true"
        assert one["metadata"]["annotations"] == {"k8s-sidecar-target-directory": "/tmp/dashboards/Podscale"}
    assert all("annotations" not in one["metadata"] for one in configmaps(folderAnnotation=""))


@pytest.mark.parametrize("value", [{"label": ""}, {"enabled": "yes"}, {"labels": {}}])
def test_a_wrong_value_is_refused(value: dict[str, Any]) -> None:
    assert "dashboards" in helm.refused({"metrics": {"dashboards": value}})
