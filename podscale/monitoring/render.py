"""The rules as objects to be written as YAML: a rule file, or an object of an operator. Pure."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from podscale.errors import InputError
from podscale.monitoring.durations import shorten_duration, shorten_expression
from podscale.monitoring.groups import ALERT_RULES, RULE_GROUPS
from podscale.monitoring.rule import RUNBOOKS_TOKEN, AlertRule, RecordingRule, RuleGroup, fill_tokens
from podscale.monitoring.thresholds import DEFAULT_THRESHOLDS

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
