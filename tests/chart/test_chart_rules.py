"""The chart's Prometheus rules: of metrics that exist, and firing exactly when they should, by the real promtool."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest

from podscale.telemetry.metrics import GAUGES, TrainMetrics
from tests.support import helm

RULES = sorted((helm.CHART / "rules").glob("*.yaml"))
ALERT = "PodscaleTrainingStalled"

# Images counted by minute, from minute 0 to 40, and the minutes at which the alert must and must not fire. (It does at
# minute 24 in Prometheus 3, whose ranges leave out their first instant, and at 25 in Prometheus 2.)
CASES: dict[str, tuple[list[str], list[int], list[int]]] = {
    "stalls at minute 10": (["0+600x10 6000x30"], [26, 40], [9, 14, 19, 23]),
    "trains on": (["0+600x40"], [], [10, 26, 40]),
    "one of two ranks stands still": (["0+600x40", "0+600x10 6000x30"], [], [26, 40]),
    "has not begun": (["0x40"], [], [26, 40]),
    "has ended": (["0+600x10 stale"], [], [11, 26, 40]),
    "starts again, from zero": (["0+600x10 0+600x29"], [], [15, 26, 40]),
    "hangs after it was started again": (["0+600x10 0+600x2 1200x27"], [30, 40], [15, 26]),
}


def promtool() -> str:
    found = shutil.which("promtool") or shutil.which("promtool", path=str(helm.cached_programs()))
    if found is None:
        pytest.skip("promtool is neither on the PATH (Debian: prometheus) nor in the cluster's cache")
    return found


def metric_names() -> set[str]:
    registry = CollectorRegistry()
    TrainMetrics(registry, rank=0, run="r")
    served = re.findall(r"^(podscale_\w+)[{ ]", generate_latest(registry).decode(), re.MULTILINE)
    return {*served, *(f"podscale_{name}" for name in GAUGES)}


@pytest.mark.parametrize("path", RULES, ids=lambda path: path.name)
def test_rules_are_of_metrics_that_exist(path: Path) -> None:
    rules = [rule for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"] for rule in group["rules"]]
    used = {name for rule in rules for name in re.findall(r"podscale_\w+", rule["expr"])}
    assert used
    assert used <= metric_names()


@pytest.mark.parametrize("path", RULES, ids=lambda path: path.name)
def test_promtool_accepts_the_rules(path: Path) -> None:
    done = subprocess.run([promtool(), "check", "rules", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("case", CASES)
def test_training_stalled(case: str, tmp_path: Path) -> None:
    series, firing, silent = CASES[case]
    labels = 'run="digits", namespace="podscale"'
    test = {
        "interval": "1m",
        "input_series": [
            {"series": f'podscale_train_images_total{{{labels}, rank="{rank}"}}', "values": values}
            for rank, values in enumerate(series)
        ],
        "alert_rule_test": [_expected(minute, fires=True) for minute in firing]
        + [_expected(minute, fires=False) for minute in silent],
    }
    file = tmp_path / "test.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(path) for path in RULES], "tests": [test]}), encoding="utf-8")
    done = subprocess.run([promtool(), "test", "rules", file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def _expected(minute: int, *, fires: bool) -> dict[str, Any]:
    rule = yaml.safe_load(RULES[0].read_text(encoding="utf-8"))["groups"][0]["rules"][0]
    told = {key: _filled(text) for key, text in rule["annotations"].items()}
    labels = {"run": "digits", "namespace": "podscale", **rule["labels"]}
    alerts = [{"exp_labels": labels, "exp_annotations": told}] if fires else []
    return {"eval_time": f"{minute}m", "alertname": ALERT, "exp_alerts": alerts}


def _filled(text: str) -> str:
    return text.replace("{{ $labels.run }}", "digits").replace("{{ $labels.namespace }}", "podscale")


def test_both_kinds_of_prometheus_get_the_rules_as_they_are() -> None:
    made = helm.template()
    groups = [yaml.safe_load(path.read_text(encoding="utf-8"))["groups"] for path in RULES]
    for kind in ("PrometheusRule", "Rules"):
        assert [item["spec"]["groups"] for item in helm.kinds(made, kind)] == groups
