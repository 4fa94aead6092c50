"""The chart installs the rules for both kinds of Prometheus, with its values filled in."""

from typing import Any

import pytest
import yaml

from podscale.monitoring.rule_files import RuleSettings, rule_file
from podscale.monitoring.rule_types import DEFAULT_THRESHOLDS
from tests.support import helm
from tools.chart_values import VALUES
from tools.monitoring_rules import render

KINDS = ("PrometheusRule", "Rules")
OTHERS = {name: (value * 2 if value > 1 else value / 2) for name, value in DEFAULT_THRESHOLDS.items()}


@pytest.mark.parametrize("path", render(), ids=lambda path: "-".join(path.parts[-2:]))
def test_generated_files_are_current(path: Any) -> None:
    assert path.read_text(encoding="utf-8") == render()[path], "run: make chart"


def test_values_have_the_thresholds_and_pages_of_the_rules() -> None:
    metrics = yaml.safe_load(VALUES.read_text(encoding="utf-8"))["metrics"]
    assert metrics["thresholds"] == DEFAULT_THRESHOLDS
    assert metrics["runbooks"] == RuleSettings().runbooks
    assert metrics["disabledAlerts"] == sorted(RuleSettings().excluded_alerts)


@pytest.mark.parametrize(
    "settings",
    [
        RuleSettings(),
        RuleSettings(thresholds=OTHERS, runbooks="https://pages.example/podscale/runbooks"),
        RuleSettings(excluded_alerts=frozenset({"PodscaleGPUXid", "PodscaleDataStarved"})),
    ],
    ids=["as it comes", "other numbers and pages", "without two alerts"],
)
def test_both_kinds_of_prometheus_get_the_rules(settings: RuleSettings) -> None:
    values = {
        "thresholds": dict(settings.thresholds),
        "runbooks": settings.runbooks,
        "disabledAlerts": sorted(settings.excluded_alerts),
    }
    objects = helm.template(values={"metrics": values})
    for kind in KINDS:
        (rule_object,) = helm.kinds(objects, kind)
        assert rule_object["spec"] == rule_file(settings)


def test_rules_may_be_left_out() -> None:
    objects = helm.template(values={"metrics": {"rules": False}})
    assert not any(helm.kinds(objects, kind) for kind in KINDS)
    assert helm.kinds(objects, "PodMonitor")


def test_monitors_label_the_run_of_pods_that_answer_no_scrape() -> None:
    """`up` has no labels of the exposition, so PodscaleMetricsAbsent takes the run from the pod's label."""
    objects = helm.template()
    operator, google = helm.monitor(objects, "PodMonitor"), helm.monitor(objects, "PodMonitoring")
    assert operator["spec"]["podTargetLabels"] == ["podscale.dev/run"]
    assert google["spec"]["targetLabels"]["fromPod"] == [{"from": "podscale.dev/run", "to": "podscale_dev_run"}]
