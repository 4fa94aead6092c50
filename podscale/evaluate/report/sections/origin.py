"""Where the run comes from: its environment, and how to have it again."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from podscale.evaluate.report.gather import ReportData
from podscale.evaluate.report.sections.parts import fact_table, section_tag
from podscale.evaluate.report.svg import Markup, tag

ENVIRONMENT_ROWS = 60


def environment(data: ReportData) -> Markup | None:
    """Versions and devices of the newest launch."""
    rows = list(flatten(data.environment))[:ENVIRONMENT_ROWS]
    if not rows:
        return None
    return section_tag("Environment", fact_table(dict(rows)))


def reproduce(data: ReportData) -> Markup | None:
    """The document and the command that give this run again."""
    if not data.config_text:
        return None
    given = data.environment.get("command")
    parts = [
        tag("p", "Save the document below as ", tag("code", "run.yaml"), " and start"),
        tag("pre", "podscale run run.yaml"),
        tag("p", "It was started by ", tag("code", given), class_="note") if given else None,
    ]
    if data.evaluation is not None:
        identity = data.evaluation.identity
        parts.append(
            fact_table(
                {
                    "document": tag("code", identity.document),
                    "data": tag("code", identity.data_fingerprint),
                    "model sha256": tag("code", identity.model_sha256) if identity.model_sha256 else None,
                }
            )
        )
    document = tag("details", tag("summary", "The resolved run document"), tag("pre", data.config_text))
    return section_tag("How to reproduce", *parts, document)


def flatten(value: Any, prefix: str = "") -> Iterable[tuple[str, str]]:
    """Nested JSON as (dotted name, text) rows."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from flatten(inner, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list) and all(isinstance(part, str | int | float) for part in value):
        yield prefix, " ".join(str(part) for part in value)
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from flatten(inner, f"{prefix}.{i}")
    elif value is not None:
        yield prefix, value if isinstance(value, str) else json.dumps(value)
