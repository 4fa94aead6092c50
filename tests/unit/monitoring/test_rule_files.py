"""The rules as files: for a Prometheus, for its operator, for Google's; with other numbers, pages, or fewer alerts."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from podscale.cli import main
from podscale.monitoring.rule_files import (
    ALERT_RULES,
    RECORDING_RULES,
    RuleSettings,
    google_rules,
    prometheus_rule,
    rule_file,
    rule_template,
)
from tests.support import crds, promtool
from tests.support.outcomes import assert_error
from tests.support.refusals import refused


def rules(file: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {rule.get("alert", rule.get("record")): rule for group in file["groups"] for rule in group["rules"]}


def test_every_rule_is_in_the_file_and_nothing_is_left_open() -> None:
    made = rule_file(RuleSettings())
    assert rules(made).keys() == {rule.name for rule in (*ALERT_RULES, *RECORDING_RULES)}
    assert "@" not in str(made)
    assert "@dataWaitShare@" in str(rule_template())


def test_a_threshold_is_filled_in_where_it_is_compared_and_where_it_is_told() -> None:
    alert = rules(rule_file(RuleSettings(thresholds={"dataWaitShare": 0.35})))["PodscaleDataStarved"]
    assert alert["expr"].endswith("> 0.35")
    assert "limit {{ 0.35 | humanizePercentage }}" in alert["annotations"]["description"]


@pytest.mark.parametrize("base", ["https://pages.example/runbooks", "https://pages.example/runbooks/"])
def test_runbooks_may_be_elsewhere(base: str) -> None:
    alert = rules(rule_file(RuleSettings(runbooks=base)))["PodscaleDataStarved"]
    assert alert["annotations"]["runbook_url"] == "https://pages.example/runbooks/PodscaleDataStarved.md"


def test_alerts_may_be_left_out_and_empty_groups_go_with_them() -> None:
    without = frozenset(alert.name for alert in ALERT_RULES)
    made = rule_file(RuleSettings(excluded_alerts=without))
    assert rules(made).keys() == {recording.name for recording in RECORDING_RULES}
    assert all(group["rules"] for group in made["groups"])


@pytest.mark.parametrize(
    ("settings", "field", "got", "known"),
    [
        ({"thresholds": {"dataWait": 1.0}}, "threshold", "dataWait", "dataWaitShare"),
        ({"excluded_alerts": frozenset({"DataStarved"})}, "alert", "DataStarved", "PodscaleDataStarved"),
    ],
)
def test_unknown_names_are_told_with_those_that_exist(settings: Any, field: str, got: str, known: str) -> None:
    with refused(known, field=field, got=got):
        RuleSettings(**settings)


def test_the_operators_object_is_what_its_definition_allows() -> None:
    made = prometheus_rule(RuleSettings())
    assert made["spec"] == rule_file(RuleSettings())
    crds.validate(made)


def test_googles_object_has_the_same_groups() -> None:
    made = google_rules(RuleSettings())
    assert (made["apiVersion"], made["kind"]) == ("monitoring.googleapis.com/v1", "Rules")
    assert made["spec"] == rule_file(RuleSettings())


@pytest.mark.parametrize(
    ("form", "kind"), [("prometheus", None), ("prometheusrule", "PrometheusRule"), ("gmp", "Rules")]
)
def test_export(form: str, kind: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "new" / "folder"
    options = ["--threshold", "gpuCelsius=80", "--without", "PodscaleGPUXid", "--runbooks", "https://pages.example/"]
    assert main(["rules", "export", str(folder), "--format", form, *options]) == 0
    path = Path(capsys.readouterr().out.strip())
    made = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert made.get("kind") == kind
    wanted = RuleSettings(
        thresholds={"gpuCelsius": 80.0},
        excluded_alerts=frozenset({"PodscaleGPUXid"}),
        runbooks="https://pages.example/",
    )
    assert (made["spec"] if kind else made) == rule_file(wanted)


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
