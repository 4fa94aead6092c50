"""The rules as objects to be written as YAML: a rule file, or an object of an operator. Pure."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from podscale.errors import InputError
from podscale.monitoring.durations import shortened, timed
from podscale.monitoring.groups import ALERTS, GROUPS
from podscale.monitoring.rule import RUNBOOKS, Alert, Group, Recording, filled
from podscale.monitoring.thresholds import DEFAULTS

RUNBOOKS_HERE = "docs/runbooks/"
"""Where this repository has the pages; a site that serves them names its own address."""
Fill = Callable[[str], str]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What differs between sites. Raises InputError for a name that does not exist, or a `shorten` below 1."""

    thresholds: Mapping[str, float] = field(default_factory=dict)
    runbooks: str = RUNBOOKS_HERE
    without: frozenset[str] = frozenset()
    """Names of alerts that are left out."""
    shorten: float = 1
    """What every range, offset and wait is divided by: for drills. Texts go on telling the shipped times."""

    def __post_init__(self) -> None:
        if not 1 <= self.shorten < math.inf:
            raise InputError("not a number of 1 or more", field="shorten", got=self.shorten)
        _known("threshold", self.thresholds.keys(), DEFAULTS)
        _known("alert", self.without, [alert.name for alert in ALERTS])

    def values(self) -> dict[str, str]:
        """What is filled in, by the name between `@`."""
        numbers = {name: number_text(number) for name, number in {**DEFAULTS, **self.thresholds}.items()}
        return {**numbers, "runbooks": self.runbooks.removesuffix("/") + "/"}


def rule_file(settings: Settings) -> dict[str, Any]:
    """What Prometheus reads from a file of `rule_files`."""
    values = settings.values()
    groups = [_group(group, settings.without, lambda text: filled(text, values), settings.shorten) for group in GROUPS]
    return {"groups": [group for group in groups if group["rules"]]}


def template() -> dict[str, Any]:
    """The rule file with every `@name@` left open: the chart fills them in from its values."""
    return {"groups": [_group(group, frozenset(), lambda text: text) for group in GROUPS]}


def prometheus_rule(settings: Settings) -> dict[str, Any]:
    """The object that the Prometheus operator takes over."""
    return _object("monitoring.coreos.com/v1", "PrometheusRule", settings)


def google_rules(settings: Settings) -> dict[str, Any]:
    """The object of Google's managed Prometheus; it sees the series of its own namespace alone."""
    return _object("monitoring.googleapis.com/v1", "Rules", settings)


FORMATS: Mapping[str, Callable[[Settings], dict[str, Any]]] = {
    "prometheus": rule_file,
    "prometheusrule": prometheus_rule,
    "gmp": google_rules,
}


def number_text(number: float) -> str:
    """A number as PromQL, YAML and Helm write it: 2, 0.001."""
    return str(int(number)) if number == int(number) else repr(float(number))


def _object(api_version: str, kind: str, settings: Settings) -> dict[str, Any]:
    metadata = {"name": "podscale", "labels": {"app.kubernetes.io/name": "podscale"}}
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, "spec": rule_file(settings)}


def _group(group: Group, without: frozenset[str], fill: Fill, shorten: float = 1) -> dict[str, Any]:
    rules = [_rule(rule, fill, shorten) for rule in group.rules if rule.name not in without]
    return {"name": group.name, "rules": rules}


def _rule(rule: Recording | Alert, fill: Fill, shorten: float) -> dict[str, Any]:
    expr = fill(timed(rule.expr.strip(), shorten))
    if isinstance(rule, Recording):
        return {"record": rule.name, "expr": expr}
    return {
        "alert": rule.name,
        "expr": expr,
        "for": shortened(rule.wait, shorten),
        "labels": {"severity": rule.severity},
        "annotations": {
            "summary": fill(rule.summary),
            "description": fill(rule.description),
            "runbook_url": fill(f"{RUNBOOKS}{rule.runbook}"),
        },
    }


def _known(what: str, given: Iterable[str], there: Iterable[str]) -> None:
    unknown = sorted(set(given) - set(there))
    if unknown:
        raise InputError("unknown name", field=what, got=unknown[0], hint=f"Choose from {', '.join(there)}.")
