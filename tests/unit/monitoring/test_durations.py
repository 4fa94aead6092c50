"""Rules with shorter durations are the shipped rules: nothing else changes, and nothing that is a time stays."""

import re
from pathlib import Path

import pytest
import yaml

from podscale.cli import main
from podscale.kubernetes.render.common import to_yaml
from podscale.monitoring.rule_files import (
    ALERT_RULES,
    RULE_GROUPS,
    RuleSettings,
    find_ranges,
    parse_milliseconds,
    prometheus_rule,
    rule_file,
    shorten_duration,
    shorten_expression,
)
from tests.support import promtool
from tests.support.refusals import refused
from tools.monitoring_rules import COMPONENTS, GENERATED

SHIPPED = COMPONENTS / "prometheus-operator" / "rules.yaml"
TIMES = 40
IN_SECONDS = re.compile(r"(?<=> )\d+(?=\nand sum by|\nunless max)|(?<=\* )[\d.]+(?=\) < 0)")
"""Where the shipped rules compare with a length of time, or predict over one, in seconds."""


def test_divided_by_one_the_rules_are_the_shipped_ones_byte_for_byte() -> None:
    made = prometheus_rule(RuleSettings(shorten=1))
    made["metadata"] = yaml.safe_load(SHIPPED.read_text(encoding="utf-8"))["metadata"]
    assert SHIPPED.read_text(encoding="utf-8") == GENERATED + to_yaml([made])


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
