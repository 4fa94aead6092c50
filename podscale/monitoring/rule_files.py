"""The rules as objects to be written as YAML: a rule file, or an object of an operator. Pure.

All rules, in the groups in which Prometheus evaluates them.

Durations in rules: ranges, offsets, waits and lengths of time in seconds; all of them can be made shorter.

A drill cannot wait a quarter of an hour for each alert. With every duration divided by the same number a rule is the
shipped one, seen faster: limits, series and joins stay what they are.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from podscale.errors import InputError
from podscale.monitoring import alerts, recording_rules
from podscale.monitoring.rule_types import (
    DEFAULT_THRESHOLDS,
    RUNBOOKS_TOKEN,
    AlertRule,
    RecordingRule,
    RuleGroup,
    fill_tokens,
)

RULE_GROUPS = (
    RuleGroup("podscale-throughput", recording_rules.THROUGHPUT_RULES),
    RuleGroup("podscale-time", recording_rules.TIME_RULES),
    RuleGroup("podscale-state", recording_rules.STATE_RULES),
    RuleGroup("podscale-hardware", recording_rules.HARDWARE_RULES),
    RuleGroup("podscale-progress-alerts", alerts.PROGRESS_ALERTS),
    RuleGroup("podscale-numerics-alerts", alerts.NUMERICS_ALERTS),
    RuleGroup("podscale-lives-alerts", alerts.RESTART_ALERTS),
    RuleGroup("podscale-place-alerts", alerts.RESOURCE_ALERTS),
)
RECORDING_RULES = tuple(rule for group in RULE_GROUPS for rule in group.rules if isinstance(rule, RecordingRule))
ALERT_RULES = tuple(rule for group in RULE_GROUPS for rule in group.rules if isinstance(rule, AlertRule))


_UNITS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_DURATION = re.compile(r"(\d+)(ms|s|m|h|d)")
_RANGE_OR_OFFSET = re.compile(r"(?<=\[)\d+[a-z]+(?=\])|(?<=\boffset )\d+[a-z]+")
_IN_SECONDS = re.compile(r"@(\d+[a-z]+)@")


def parse_milliseconds(duration: str) -> int:
    """A duration of Prometheus with one unit, such as 5m."""
    found = _DURATION.fullmatch(duration)
    assert found is not None, duration
    return int(found[1]) * _UNITS[found[2]]


def shorten_duration(duration: str, times: float) -> str:
    """The duration divided by `times`, in the largest unit that it is a multiple of: 5m by 40 is 7500ms."""
    length = round(parse_milliseconds(duration) / times)
    unit = next(unit for unit in reversed(_UNITS) if length % _UNITS[unit] == 0) if length else "s"
    return f"{length // _UNITS[unit]}{unit}"


def shorten_expression(expr: str, times: float = 1) -> str:
    """PromQL with every range, offset and `@1h@` (that length of time as a number of seconds) divided by `times`."""
    shorter = _RANGE_OR_OFFSET.sub(lambda found: shorten_duration(found[0], times), expr)
    return _IN_SECONDS.sub(lambda found: f"{parse_milliseconds(found[1]) / times / 1000:.10g}", shorter)


def find_ranges(expr: str) -> list[str]:
    """The ranges and offsets of an expression, longest first."""
    return sorted(_RANGE_OR_OFFSET.findall(expr), key=parse_milliseconds, reverse=True)


RUNBOOKS_DIRECTORY = "docs/runbooks/"
"""Where this repository has the pages; a site that serves them names its own address."""
FillTokens = Callable[[str], str]


@dataclass(frozen=True, kw_only=True)
class RuleSettings:
    """What differs between sites. Raises InputError for a name that does not exist, or a `shorten` below 1."""

    thresholds: Mapping[str, float] = field(default_factory=dict)
    runbooks: str = RUNBOOKS_DIRECTORY
    excluded_alerts: frozenset[str] = frozenset()
    """Names of alerts that are left out."""
    shorten: float = 1
    """What every range, offset and wait is divided by: for drills. Texts go on telling the shipped times."""

    def __post_init__(self) -> None:
        if not 1 <= self.shorten < math.inf:
            raise InputError("not a number of 1 or more", field="shorten", got=self.shorten)
        _check_known("threshold", self.thresholds.keys(), DEFAULT_THRESHOLDS)
        _check_known("alert", self.excluded_alerts, [alert.name for alert in ALERT_RULES])

    def values(self) -> dict[str, str]:
        """What is filled in, by the name between `@`."""
        numbers = {name: format_number(number) for name, number in {**DEFAULT_THRESHOLDS, **self.thresholds}.items()}
        return {**numbers, "runbooks": self.runbooks.removesuffix("/") + "/"}


def rule_file(settings: RuleSettings) -> dict[str, Any]:
    """What Prometheus reads from a file of `rule_files`."""
    values = settings.values()
    groups = [
        _render_group(group, settings.excluded_alerts, lambda text: fill_tokens(text, values), settings.shorten)
        for group in RULE_GROUPS
    ]
    return {"groups": [group for group in groups if group["rules"]]}


def rule_template() -> dict[str, Any]:
    """The rule file with every `@name@` left open: the chart fills them in from its values."""
    return {"groups": [_render_group(group, frozenset(), lambda text: text) for group in RULE_GROUPS]}


def prometheus_rule(settings: RuleSettings) -> dict[str, Any]:
    """The object that the Prometheus operator takes over."""
    return _operator_object("monitoring.coreos.com/v1", "PrometheusRule", settings)


def google_rules(settings: RuleSettings) -> dict[str, Any]:
    """The object of Google's managed Prometheus; it sees the series of its own namespace alone."""
    return _operator_object("monitoring.googleapis.com/v1", "Rules", settings)


FORMATS: Mapping[str, Callable[[RuleSettings], dict[str, Any]]] = {
    "prometheus": rule_file,
    "prometheusrule": prometheus_rule,
    "gmp": google_rules,
}


def format_number(number: float) -> str:
    """A number as PromQL, YAML and Helm write it: 2, 0.001."""
    return str(int(number)) if number == int(number) else repr(float(number))


def _operator_object(api_version: str, kind: str, settings: RuleSettings) -> dict[str, Any]:
    metadata = {"name": "podscale", "labels": {"app.kubernetes.io/name": "podscale"}}
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, "spec": rule_file(settings)}


def _render_group(group: RuleGroup, without: frozenset[str], fill: FillTokens, shorten: float = 1) -> dict[str, Any]:
    rules = [_render_rule(rule, fill, shorten) for rule in group.rules if rule.name not in without]
    return {"name": group.name, "rules": rules}


def _render_rule(rule: RecordingRule | AlertRule, fill: FillTokens, shorten: float) -> dict[str, Any]:
    expr = fill(shorten_expression(rule.expr.strip(), shorten))
    if isinstance(rule, RecordingRule):
        return {"record": rule.name, "expr": expr}
    return {
        "alert": rule.name,
        "expr": expr,
        "for": shorten_duration(rule.hold_for, shorten),
        "labels": {"severity": rule.severity},
        "annotations": {
            "summary": fill(rule.summary),
            "description": fill(rule.description),
            "runbook_url": fill(f"{RUNBOOKS_TOKEN}{rule.runbook}"),
        },
    }


def _check_known(what: str, given: Iterable[str], there: Iterable[str]) -> None:
    unknown = sorted(set(given) - set(there))
    if unknown:
        raise InputError("unknown name", field=what, got=unknown[0], hint=f"Choose from {', '.join(there)}.")
