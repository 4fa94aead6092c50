"""Source of the rules: existing series and labels, informative texts, and a runbook for each alert."""

import re
from pathlib import Path

import pytest
import yaml

from podscale.monitoring.rule_files import (
    ALERT_RULES,
    RECORDING_RULES,
    RULE_GROUPS,
    RuleSettings,
    format_number,
    rule_file,
)
from podscale.monitoring.rule_types import DEFAULT_THRESHOLDS, THRESHOLDS, AlertRule, RecordingRule, find_tokens
from podscale.telemetry.catalogue import METRICS, MetricSpec
from tests.rules.cases import FOREIGN
from tests.support.promtool import Promtool

RULES = (*RECORDING_RULES, *ALERT_RULES)
RUNBOOKS = Path(__file__).resolve().parents[2] / "docs" / "runbooks"
SERIES: dict[str, MetricSpec] = {entry.series: entry for entry in METRICS}
OF_PROMQL = set(
    re.findall(
        r"\w+",
        """
        and or unless on by without ignoring group_left group_right bool offset sum avg min max count group quantile
        topk rate increase changes time predict_linear last_over_time max_over_time min_over_time quantile_over_time
        count_over_time present_over_time label_replace deriv
        """,
    )
)
"""PromQL keywords and functions that the rules use, all of them in Prometheus 2.42."""
OF_TARGETS = {"namespace", "pod", "job", "instance", "exported_pod", "exported_namespace", "podscale_dev_run"}


def series_of(expr: str) -> set[str]:
    """Return the series in an expression: the names left after strings, matchers, label lists, ranges and keywords."""
    bare = re.sub(r'"[^"]*"|@\w+@', "", expr)
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]|offset \w+", "", bare)
    bare = re.sub(r"\b(by|on|without|ignoring|group_left|group_right)\s*\([^)]*\)", "", bare)
    return set(re.findall(r"[a-zA-Z_][\w:]*", bare)) - OF_PROMQL


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_rules_are_of_series_that_exist(rule: AlertRule | RecordingRule) -> None:
    names = series_of(rule.expr)
    assert names
    unknown = names - SERIES.keys() - FOREIGN - {recording.name for recording in RECORDING_RULES}
    assert not unknown, "add them to podscale/telemetry/catalogue.py, or to FOREIGN if they are third-party series"


def test_every_listed_third_party_series_is_used() -> None:
    assert set().union(*(series_of(rule.expr) for rule in RULES)) >= FOREIGN


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_matchers_name_labels_and_values_that_exist(rule: AlertRule | RecordingRule) -> None:
    for name, matchers in re.findall(r"([\w:]+)\{([^}]*)\}", rule.expr):
        for label, values in re.findall(r'(\w+)(?:=~|!~|!=|=)"([^"]*)"', matchers):
            if name in FOREIGN or label in OF_TARGETS:
                continue
            allowed = SERIES[name].own_labels[label] if name in SERIES else STATES_OF_RECORDED[label]
            assert set(values.split("|")) <= set(allowed), (name, label)


STATES_OF_RECORDED = {"state": SERIES["podscale_train_wall_seconds_total"].own_labels["state"]}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_runs_and_namespaces_never_mix(rule: AlertRule | RecordingRule) -> None:
    """Every aggregation and join keeps the namespace, and the run unless it joins targets or pods."""
    for labels in re.findall(r"\b(?:by|on)\s*\(([^)]*)\)", rule.expr):
        names = set(re.split(r",\s*", labels))
        assert "namespace" in names
        assert "run" in names or names & {"pod", "instance"}


def test_names_are_unique_and_follow_the_conventions() -> None:
    names = [rule.name for rule in RULES]
    assert len(set(names)) == len(names)
    assert len({group.name for group in RULE_GROUPS}) == len(RULE_GROUPS)
    assert all(re.fullmatch(r"[a-z_]+:podscale_[a-z_]+:[a-z0-9_]+", recording.name) for recording in RECORDING_RULES)
    assert all(re.fullmatch(r"Podscale[A-Z][A-Za-z]+", alert.name) for alert in ALERT_RULES)
    assert all(recording.meaning.endswith(".") for recording in RECORDING_RULES)


@pytest.mark.parametrize("recording", RECORDING_RULES, ids=lambda recording: recording.name)
def test_the_level_of_a_recording_is_the_labels_it_keeps(recording: RecordingRule) -> None:
    level = set(recording.name.partition(":")[0].split("_"))
    assert level <= {"run", "rank", "phase", "state", "cause", "volume", "gpu", "pod"}
    assert any(
        level <= set(re.split(r",\s*", labels)) for labels in re.findall(r"\bby\s*\(([^)]*)\)", recording.expr)
    ) or any(other.name in recording.expr for other in RECORDING_RULES if other is not recording)


@pytest.mark.parametrize("alert", ALERT_RULES, ids=lambda alert: alert.name)
def test_alert_texts_name_the_run_and_the_value(alert: AlertRule) -> None:
    assert "$labels.run" in alert.summary + alert.description
    assert "$value" in alert.summary + alert.description
    assert alert.summary.endswith(".")
    assert alert.description.endswith(".")
    assert re.fullmatch(r"\d+[sm]", alert.hold_for)


def test_thresholds_are_used_by_the_alert_that_they_name() -> None:
    for threshold in THRESHOLDS:
        using = {rule.name for rule in RULES if threshold.name in find_tokens(rule.expr)}
        assert using == {threshold.meaning.partition(":")[0]}
    for rule in RULES:
        texts = [rule.expr, *([rule.summary, rule.description] if isinstance(rule, AlertRule) else [])]
        assert set().union(*map(find_tokens, texts)) <= DEFAULT_THRESHOLDS.keys()


def test_promtool_accepts_the_rules_with_other_numbers_too(tmp_path: Path, tool: Promtool) -> None:
    odd = RuleSettings(thresholds={**DEFAULT_THRESHOLDS, "seriesPerTarget": 2_000_000, "dataWaitShare": 0.0000125})
    for number, settings in enumerate((RuleSettings(), odd)):
        path = tmp_path / f"rules-{number}.yaml"
        path.write_text(yaml.safe_dump(rule_file(settings)), encoding="utf-8")
        tool.check("rules", path)
    assert (format_number(2.0), format_number(0.001), format_number(2_000_000)) == ("2", "0.001", "2000000")


SECTIONS = ["Confirm", "Likely causes", "What to do", "Silence"]


def test_each_alert_has_a_page_and_each_page_an_alert() -> None:
    assert {path.name for path in RUNBOOKS.glob("*.md")} == {"README.md", *(alert.runbook for alert in ALERT_RULES)}


@pytest.mark.parametrize("alert", ALERT_RULES, ids=lambda alert: alert.name)
def test_runbooks_have_all_sections_and_name_their_thresholds(alert: AlertRule) -> None:
    page = (RUNBOOKS / alert.runbook).read_text(encoding="utf-8")
    assert page.startswith(f"# {alert.name}\n")
    assert re.findall(r"^## (.*)$", page, re.MULTILINE) == SECTIONS
    assert {name for name in DEFAULT_THRESHOLDS if f"metrics.thresholds.{name}" in page} == find_tokens(alert.expr)
    assert f"alertname={alert.name} " in page
    for linked in re.findall(r"\]\(([^)]+)\)", page):
        assert (RUNBOOKS / linked.partition("#")[0]).exists(), linked


def test_queries_of_the_pages_are_of_series_that_exist(tmp_path: Path, tool: Promtool) -> None:
    queries = [
        query.replace("RANK", "0")
        for alert in ALERT_RULES
        for block in re.findall(r"```promql\n(.*?)```", (RUNBOOKS / alert.runbook).read_text(), re.DOTALL)
        for query in block.splitlines()
    ]
    assert len(queries) > len(ALERT_RULES)
    known = SERIES.keys() | FOREIGN | {recording.name for recording in RECORDING_RULES} | {"__name__"}
    for query in queries:
        assert series_of(query) <= known, query
    rules = [{"record": f"query:{number}", "expr": query} for number, query in enumerate(queries)]
    path = tmp_path / "queries.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}), encoding="utf-8")
    tool.check("rules", path)
