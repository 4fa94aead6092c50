"""The shapes of rules. Texts hold `@name@` where a threshold or the address of the runbooks is filled in, expressions
`@1h@` where that length of time stands as a number of seconds.

Everything runs on Prometheus 2.42, the oldest that users have (Debian 12). Every rule is by namespace and run, so that
runs never mix; outside Kubernetes the namespace is empty, which PromQL takes for absent.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

AlertSeverity = Literal["critical", "warning"]
RUNBOOKS_TOKEN = "@runbooks@"
_TOKEN = re.compile(r"@([a-zA-Z]\w*)@")


@dataclass(frozen=True)
class RecordingRule:
    """A series that is computed once for alerts, dashboards and people. name: `level:podscale_what:operation`."""

    name: str
    expr: str
    meaning: str


@dataclass(frozen=True)
class AlertRule:
    """A condition that somebody has to look at; `wait` (Prometheus' `for`) is how long it must hold."""

    name: str
    expr: str
    hold_for: str
    severity: AlertSeverity
    summary: str
    description: str

    @property
    def runbook(self) -> str:
        """File of its page in docs/runbooks/."""
        return f"{self.name}.md"


@dataclass(frozen=True)
class Threshold:
    """A number that fits one site and not another; the chart has it as a value of this name."""

    name: str
    default: float
    meaning: str


@dataclass(frozen=True)
class RuleGroup:
    """Rules that are evaluated together, in this order."""

    name: str
    rules: tuple[RecordingRule | AlertRule, ...]


def fill_tokens(text: str, values: Mapping[str, str]) -> str:
    """The text with every `@name@` replaced. KeyError for a name that `values` lacks."""
    return _TOKEN.sub(lambda token: values[token[1]], text)


def find_tokens(text: str) -> set[str]:
    """The names between `@` in a text."""
    return set(_TOKEN.findall(text))
