"""`podscale rules`: the recording rules and alerts as files."""

import math
from collections.abc import Sequence
from pathlib import Path

from podscale.errors import InputError
from podscale.kubernetes.render.common import to_yaml
from podscale.monitoring.rule_files import FORMATS, RuleSettings

RULES_FILE = "podscale-rules.yaml"


def export_rules(
    directory: Path,
    *,
    form: str,
    runbooks: str,
    thresholds: Sequence[str],
    without: Sequence[str],
    shorten: float,
) -> None:
    """Writes one file into `directory` and prints its path."""
    if form not in FORMATS:
        raise InputError("unknown format", field="--format", got=form, hint=f"Choose one of {', '.join(FORMATS)}.")
    settings = RuleSettings(
        thresholds=dict(map(_parse_threshold, thresholds)),
        runbooks=runbooks,
        excluded_alerts=frozenset(without),
        shorten=shorten,
    )
    text = to_yaml([FORMATS[form](settings)])
    path = directory / RULES_FILE
    try:
        directory.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror or error}", field=str(path)) from error
    print(path)


def _parse_threshold(text: str) -> tuple[str, float]:
    name, equals, value = text.partition("=")
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not equals or not math.isfinite(number) or number < 0:
        problem = "not NAME=NUMBER with a number of 0 or more, such as dataWaitShare=0.3"
        raise InputError(problem, field="--threshold", got=text)
    return name, number
