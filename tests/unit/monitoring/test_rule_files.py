"""The rules as files: for a Prometheus, for its operator, for Google's; with other numbers, pages, or fewer alerts."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from podscale.cli import main
from podscale.kubernetes.render.common import to_yaml
from podscale.monitoring.rule_files import (
    ALERT_RULES,
    RECORDING_RULES,
    RULE_GROUPS,
    RuleSettings,
    find_ranges,
    google_rules,
    parse_milliseconds,
    prometheus_rule,
    rule_file,
    rule_template,
    shorten_duration,
    shorten_expression,
)
from tests.support import crds, promtool
from tests.support.outcomes import assert_error
from tests.support.refusals import refused
from tools.monitoring_rules import COMPONENTS, GENERATED


def rules(file: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {rule.get("alert", rule.get("record")): rule for group in file["groups"] for rule in group["rules"]}


def test_every_rule_is_in_the_file_and_nothing_is_left_open() -> None:
    exported = rule_file(RuleSettings())
    assert rules(exported).keys() == {rule.name for rule in (*ALERT_RULES, *RECORDING_RULES)}
    assert "@" not in str(exported)
    assert "@dataWaitShare@" in str(rule_template())


def test_a_threshold_is_filled_into_expression_and_description() -> None:
    alert = rules(rule_file(RuleSettings(thresholds={"dataWaitShare": 0.35})))["PodscaleDataStarved"]
    assert alert["expr"].endswith("> 0.35")
    assert "limit {{ 0.35 | humanizePercentage }}" in alert["annotations"]["description"]


@pytest.mark.parametrize("base", ["https://pages.example/runbooks", "https://pages.example/runbooks/"])
def test_runbooks_may_be_elsewhere(base: str) -> None:
    alert = rules(rule_file(RuleSettings(runbooks=base)))["PodscaleDataStarved"]
    assert alert["annotations"]["runbook_url"] == "https://pages.example/runbooks/PodscaleDataStarved.md"


def test_alerts_may_be_left_out_and_empty_groups_go_with_them() -> None:
    without = frozenset(alert.name for alert in ALERT_RULES)
    exported = rule_file(RuleSettings(excluded_alerts=without))
    assert rules(exported).keys() == {recording.name for recording in RECORDING_RULES}
    assert all(group["rules"] for group in exported["groups"])


@pytest.mark.parametrize(
    ("settings", "field", "got", "known"),
    [
        ({"thresholds": {"dataWait": 1.0}}, "threshold", "dataWait", "dataWaitShare"),
        ({"excluded_alerts": frozenset({"DataStarved"})}, "alert", "DataStarved", "PodscaleDataStarved"),
    ],
)
def test_unknown_names_are_refused_with_the_known_ones(settings: Any, field: str, got: str, known: str) -> None:
    with refused(known, field=field, got=got):
        RuleSettings(**settings)


def test_the_operators_object_is_what_its_definition_allows() -> None:
    exported = prometheus_rule(RuleSettings())
    assert exported["spec"] == rule_file(RuleSettings())
    crds.validate(exported)


def test_googles_object_has_the_same_groups() -> None:
    exported = google_rules(RuleSettings())
    assert (exported["apiVersion"], exported["kind"]) == ("monitoring.googleapis.com/v1", "Rules")
    assert exported["spec"] == rule_file(RuleSettings())


@pytest.mark.parametrize(
    ("form", "kind"), [("prometheus", None), ("prometheusrule", "PrometheusRule"), ("gmp", "Rules")]
)
def test_export(form: str, kind: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "new" / "folder"
    options = ["--threshold", "gpuCelsius=80", "--without", "PodscaleGPUXid", "--runbooks", "https://pages.example/"]
    assert main(["rules", "export", str(folder), "--format", form, *options]) == 0
    path = Path(capsys.readouterr().out.strip())
    exported = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert exported.get("kind") == kind
    expected = RuleSettings(
        thresholds={"gpuCelsius": 80.0},
        excluded_alerts=frozenset({"PodscaleGPUXid"}),
        runbooks="https://pages.example/",
    )
    assert (exported["spec"] if kind else exported) == rule_file(expected)


def test_an_exported_file_is_one_that_prometheus_takes(tmp_path: Path) -> None:
    assert main(["rules", "export", str(tmp_path)]) == 0
    promtool.anywhere().check("rules", tmp_path / "podscale-rules.yaml")


@pytest.mark.parametrize(
    ("options", "field", "words"),
    [
        (["--format", "helm"], "--format", ["helm", "prometheus, prometheusrule, gmp"]),
        (["--threshold", "gpuCelsius"], "--threshold", ["NAME=NUMBER", "gpuCelsius"]),
        (["--threshold", "gpuCelsius=hot"], "--threshold", ["NAME=NUMBER", "gpuCelsius=hot"]),
        (["--threshold", "gpuCelsius=nan"], "--threshold", ["NAME=NUMBER", "gpuCelsius=nan"]),
        (["--threshold", "celsius=80"], "threshold", ["celsius", "gpuCelsius"]),
        (["--shorten", "0.5"], "shorten", ["0.5", "1 or more"]),
        (["--without", "GPUXid"], "alert", ["GPUXid", "PodscaleGPUXid"]),
    ],
    ids=" ".join,
)
def test_bad_input_gets_a_message(
    options: list[str], field: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_error(main(["rules", "export", str(tmp_path), *options]), capsys.readouterr().err, *words, field=field)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    code = main(["rules", "export", str(tmp_path / "file" / "rules")])
    assert_error(code, capsys.readouterr().err, field=tmp_path / "file" / "rules" / "podscale-rules.yaml")


SHIPPED = COMPONENTS / "prometheus-operator" / "rules.yaml"
TIMES = 40


def test_divided_by_one_the_rules_are_the_shipped_ones_byte_for_byte() -> None:
    exported = prometheus_rule(RuleSettings(shorten=1))
    exported["metadata"] = yaml.safe_load(SHIPPED.read_text(encoding="utf-8"))["metadata"]
    assert SHIPPED.read_text(encoding="utf-8") == GENERATED + to_yaml([exported])


def test_divided_by_another_number_only_durations_differ_and_all_by_that_number() -> None:
    whole, short = (to_yaml([rule_file(RuleSettings(shorten=times))]) for times in (1, TIMES))
    pattern = re.compile(r"(?<=\[)\d+[a-z]+(?=\])|(?<=\boffset )\d+[a-z]+|(?<=for: )\d+[a-z]+")
    lengths = [[parse_milliseconds(found) for found in pattern.findall(text)] for text in (whole, short)]
    assert len(lengths[0]) > 50
    assert lengths[0] == [length * TIMES for length in lengths[1]]
    rest = [pattern.sub("", text) for text in (whole, short)]
    differing = [pair for pair in zip(*(text.splitlines() for text in rest), strict=True) if pair[0] != pair[1]]
    assert len(differing) == 4, "two ages in PodscaleGoodputLow, two predictions in PodscaleDiskFilling"
    numbers = [[float(re.findall(r"[\d.]+", line)[-1 - ("<" in line)]) for line in pair] for pair in differing]
    assert all(one == other * TIMES for one, other in numbers), differing


def test_no_rule_has_a_length_of_time_in_plain_seconds() -> None:
    """They would stay as they are where all others are shortened."""
    exprs = [rule.expr for group in RULE_GROUPS for rule in group.rules]
    assert not [expr for expr in exprs if re.search(r"\b(30|60|[1-9]\d*00)\b", re.sub(r"@\w+@|\[\w+\]", "", expr))]
    assert any("@1h@" in expr for expr in exprs)


@pytest.mark.parametrize(
    ("duration", "times", "short"),
    [("5m", 1, "5m"), ("60m", 1, "1h"), ("5m", 20, "15s"), ("5m", 40, "7500ms"), ("1h", 40, "90s"), ("0s", 40, "0s")],
)
def test_a_duration_is_divided(duration: str, times: float, short: str) -> None:
    assert shorten_duration(duration, times) == short


def test_an_expression_is_divided() -> None:
    expr = 'a{b="5m"}[5m] offset 30m > @1h@ < 3'
    assert shorten_expression(expr) == 'a{b="5m"}[5m] offset 30m > 3600 < 3'
    assert shorten_expression(expr, 40) == 'a{b="5m"}[7500ms] offset 45s > 90 < 3'
    assert find_ranges(expr) == ["30m", "5m"]


@pytest.mark.parametrize("times", [0, 0.5, -1, float("inf"), float("nan")])
def test_nothing_becomes_longer(times: float) -> None:
    with refused(field="shorten"):
        RuleSettings(shorten=times)


def test_shorter_rules_are_exported_and_prometheus_takes_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rules", "export", str(tmp_path), "--shorten", "40"]) == 0
    path = Path(capsys.readouterr().out.strip())
    assert yaml.safe_load(path.read_text(encoding="utf-8")) == rule_file(RuleSettings(shorten=40))
    promtool.anywhere().check("rules", path)
    assert all(parse_milliseconds(alert.hold_for) % 40 == 0 for alert in ALERT_RULES), "40 leaves whole milliseconds"
