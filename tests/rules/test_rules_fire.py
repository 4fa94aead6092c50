"""Every rule over time, evaluated by the real promtool: recorded values, firing and silent alerts."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from podscale.monitoring.rule_files import ALERT_RULES, RECORDING_RULES, RuleSettings, rule_file
from podscale.monitoring.rule_types import AlertRule, RecordingRule
from tests.rules import cases_numerics, cases_progress, cases_resources, cases_restarts, cases_speed
from tests.rules.cases import Case, Labels, Recorded, Series, selector
from tests.rules.recorded import RECORDED
from tests.support.promtool import Promtool

CASES: tuple[Case, ...] = (
    *cases_progress.CASES,
    *cases_speed.CASES,
    *cases_numerics.CASES,
    *cases_restarts.CASES,
    *cases_resources.CASES,
)

TEXTS = yaml.safe_load((Path(__file__).parent / "texts.yaml").read_text(encoding="utf-8"))
ONE_GROUP = "under-test"


@pytest.mark.parametrize("alert", ALERT_RULES, ids=lambda alert: alert.name)
def test_alerts_fire_in_exactly_the_cases_that_expect_them(alert: AlertRule, tmp_path: Path, tool: Promtool) -> None:
    groups = [_alert_group(case, alert) for case in CASES if case.alert == alert.name]
    assert groups
    tool.test(_needed_for(alert), groups, tmp_path)


@pytest.mark.parametrize("recording", RECORDING_RULES, ids=lambda recording: recording.name)
def test_recording_rules_give_the_expected_values(recording: RecordingRule, tmp_path: Path, tool: Promtool) -> None:
    groups = [_recording_group(case) for case in RECORDED if case.record == recording.name]
    assert groups
    tool.test(_needed_for(recording), groups, tmp_path)


@pytest.mark.parametrize("alert", ALERT_RULES, ids=lambda alert: alert.name)
def test_every_alert_has_cases_of_both_kinds(alert: AlertRule) -> None:
    cases = [case for case in CASES if case.alert == alert.name]
    assert any(case.fires for case in cases)
    assert any(case.silent and not case.fires for case in cases)
    assert len({case.says for case in cases}) == len(cases)
    who = {labels.get("run", "") for case in cases for firing in case.fires.values() for labels in firing}
    where = {labels.get("namespace", "") for case in cases for firing in case.fires.values() for labels in firing}
    assert {"sick"} <= who | where, "one case needs two runs or namespaces of which one, `sick`, fires"


@pytest.mark.parametrize("alert", ALERT_RULES, ids=lambda alert: alert.name)
def test_alert_texts_equal_texts_yaml(alert: AlertRule, tmp_path: Path, tool: Promtool) -> None:
    """Compare the texts of the alert's first case with texts.yaml."""
    case = next(case for case in CASES if case.alert == alert.name and case.fires)
    minute, firing = next(iter(case.fires.items()))
    texts = {**TEXTS[alert.name], "runbook_url": f"docs/runbooks/{alert.name}.md"}
    expected = [{"exp_labels": {"severity": alert.severity, **labels}, "exp_annotations": texts} for labels in firing]
    group = _group(case.says, case.series, "vector(1)", {}) | {
        "alert_rule_test": [{"eval_time": f"{minute}m", "alertname": alert.name, "exp_alerts": expected}]
    }
    tool.test(_needed_for(alert), [group], tmp_path)


def _needed_for(rule: AlertRule | RecordingRule) -> dict[str, Any]:
    """Return a rule file with this rule and the rules that it reads; all rules take twenty times as long."""
    rules = {
        one.get("alert", one.get("record")): one
        for group in rule_file(RuleSettings())["groups"]
        for one in group["rules"]
    }
    chosen: list[str] = []

    def add(name: str) -> None:
        for recording in RECORDING_RULES:
            if recording.name != name and recording.name in rules[name]["expr"] and recording.name not in chosen:
                add(recording.name)
        chosen.append(name)

    add(rule.name)
    return {"groups": [{"name": ONE_GROUP, "rules": [rules[name] for name in chosen]}]}


def _alert_group(case: Case, alert: AlertRule) -> dict[str, Any]:
    expected: dict[int, tuple[Labels, ...]] = {**dict.fromkeys(case.silent, ()), **case.fires}
    shown = {"alertname": alert.name, "alertstate": "firing", "severity": alert.severity}
    query = selector("ALERTS", {"alertname": alert.name, "alertstate": "firing"})
    samples = {
        minute: [(selector("ALERTS", {**shown, **labels}), 1.0) for labels in firing]
        for minute, firing in expected.items()
    }
    return _group(f"{alert.name}: {case.says}", case.series, query, samples)


def _recording_group(case: Recorded) -> dict[str, Any]:
    samples = {
        minute: [(selector(case.record, labels), value) for labels, value in expected]
        for minute, expected in case.gives.items()
    }
    return _group(f"{case.record}: {case.says}", case.series, case.record, samples)


def _group(
    name: str, series: tuple[Series, ...], query: str, samples: dict[int, list[tuple[str, float]]]
) -> dict[str, Any]:
    return {
        "name": name,
        "interval": "1m",
        "input_series": [{"series": what, "values": values} for what, values in series],
        "promql_expr_test": [
            {
                "expr": query,
                "eval_time": f"{minute}m",
                "exp_samples": [{"labels": labels, "value": value} for labels, value in expected],
            }
            for minute, expected in samples.items()
        ],
    }
