"""Rule files: all rules in their groups, rendered for Prometheus or an operator.

Drills divide every duration (ranges, offsets, hold times) by one factor, so that alerts fire sooner.
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
    RuleGroup("podscale-restart-alerts", alerts.RESTART_ALERTS),
    RuleGroup("podscale-resource-alerts", alerts.RESOURCE_ALERTS),
)
RECORDING_RULES = tuple(rule for group in RULE_GROUPS for rule in group.rules if isinstance(rule, RecordingRule))
ALERT_RULES = tuple(rule for group in RULE_GROUPS for rule in group.rules if isinstance(rule, AlertRule))
RUNBOOKS_DIRECTORY = "docs/runbooks/"
"""Runbooks in this repository; a site that serves them sets its own address."""
FillTokens = Callable[[str], str]

_UNITS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_DURATION = re.compile(r"(\d+)(ms|s|m|h|d)")
_RANGE_OR_OFFSET = re.compile(r"(?<=\[)\d+[a-z]+(?=\])|(?<=\boffset )\d+[a-z]+")
_IN_SECONDS = re.compile(r"@(\d+[a-z]+)@")


def parse_milliseconds(duration: str) -> int:
    """Parse a Prometheus duration with one unit, such as 5m."""
    match = _DURATION.fullmatch(duration)
    assert match is not None, duration
    return int(match[1]) * _UNITS[match[2]]


def shorten_duration(duration: str, times: float) -> str:
    """Divide the duration by `times`, in the largest unit that keeps it whole: 5m by 40 is 7500ms."""
    length = round(parse_milliseconds(duration) / times)
    unit = next(unit for unit in reversed(_UNITS) if length % _UNITS[unit] == 0) if length else "s"
    return f"{length // _UNITS[unit]}{unit}"


def shorten_expression(expr: str, times: float = 1) -> str:
    """Divide every range, offset and `@1h@` (a duration in seconds) in PromQL by `times`."""
    shorter = _RANGE_OR_OFFSET.sub(lambda match: shorten_duration(match[0], times), expr)
    return _IN_SECONDS.sub(lambda match: f"{parse_milliseconds(match[1]) / times / 1000:.10g}", shorter)


def find_ranges(expr: str) -> list[str]:
    """Return the ranges and offsets of an expression, longest first."""
    return sorted(_RANGE_OR_OFFSET.findall(expr), key=parse_milliseconds, reverse=True)


@dataclass(frozen=True, kw_only=True)
class RuleSettings:
    """Site-specific settings of the rules. Raises InputError for an unknown name or `shorten` below 1.

    Args:
        runbooks: Address of the runbooks.
        excluded_alerts: Alerts to omit.
        shorten: Divisor of every range, offset and hold time, for drills. Texts keep the original times.
    """

    thresholds: Mapping[str, float] = field(default_factory=dict)
    runbooks: str = RUNBOOKS_DIRECTORY
    excluded_alerts: frozenset[str] = frozenset()
    shorten: float = 1

    def __post_init__(self) -> None:
        if not 1 <= self.shorten < math.inf:
            raise InputError("not a number of 1 or more", field="shorten", got=self.shorten)
        _check_known("threshold", self.thresholds.keys(), DEFAULT_THRESHOLDS)
        _check_known("alert", self.excluded_alerts, [alert.name for alert in ALERT_RULES])

    def values(self) -> dict[str, str]:
        """Return the replacement of each `@name@`."""
        numbers = {name: format_number(number) for name, number in {**DEFAULT_THRESHOLDS, **self.thresholds}.items()}
        return {**numbers, "runbooks": self.runbooks.removesuffix("/") + "/"}


def rule_file(settings: RuleSettings) -> dict[str, Any]:
    """Return the content of a Prometheus rule file."""
    values = settings.values()
    groups = [
        _render_group(group, settings.excluded_alerts, lambda text: fill_tokens(text, values), settings.shorten)
        for group in RULE_GROUPS
    ]
    return {"groups": [group for group in groups if group["rules"]]}


def rule_template() -> dict[str, Any]:
    """Return the rule file with every `@name@`, which the chart replaces by its values."""
    return {"groups": [_render_group(group, frozenset(), lambda text: text) for group in RULE_GROUPS]}


def prometheus_rule(settings: RuleSettings) -> dict[str, Any]:
    """Return the rules as PrometheusRule of the Prometheus operator."""
    metadata = {"name": "podscale", "labels": {"app.kubernetes.io/name": "podscale"}}
    kind = {"apiVersion": "monitoring.coreos.com/v1", "kind": "PrometheusRule"}
    return {**kind, "metadata": metadata, "spec": rule_file(settings)}


def google_rules(settings: RuleSettings) -> dict[str, Any]:
    """Return the rules as Rules of Google's managed Prometheus, which apply to their own namespace only."""
    return {**prometheus_rule(settings), "apiVersion": "monitoring.googleapis.com/v1", "kind": "Rules"}


FORMATS: Mapping[str, Callable[[RuleSettings], dict[str, Any]]] = {
    "prometheus": rule_file,
    "prometheusrule": prometheus_rule,
    "gmp": google_rules,
}


def format_number(number: float) -> str:
    """Format a number for PromQL, YAML and Helm, such as 2 or 0.001."""
    return str(int(number)) if number == int(number) else repr(float(number))


def _render_group(group: RuleGroup, excluded: frozenset[str], fill: FillTokens, shorten: float = 1) -> dict[str, Any]:
    rules = [_render_rule(rule, fill, shorten) for rule in group.rules if rule.name not in excluded]
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


def _check_known(field: str, names: Iterable[str], known: Iterable[str]) -> None:
    if unknown := sorted(set(names) - set(known)):
        raise InputError("unknown name", field=field, got=unknown[0], hint=f"Choose from {', '.join(known)}.")
