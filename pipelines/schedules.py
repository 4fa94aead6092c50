"""Recurring runs: cron expressions as KFP reads them, and the ids of the runs.

KFP's controller uses robfig/cron 1.2, whose grammar is checked here, because the backend reports an invalid expression
late and without the field.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from podscale.components.run_parameters import TIME_FIELD, longest_base
from podscale.config import RunConfig
from podscale.errors import InputError
from podscale.runs.ensemble_members import ensemble_members

DESCRIPTORS = ("@yearly", "@annually", "@monthly", "@weekly", "@daily", "@midnight", "@hourly")
MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
WEEKDAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
_DURATION = re.compile(r"(\d+(\.\d+)?(h|m|s))+")


@dataclass(frozen=True)
class CronField:
    """Field of a cron expression, with its bounds and the names of its values from `low` on."""

    name: str
    low: int
    high: int
    names: Sequence[str] = ()


FIELDS = (
    CronField("second", 0, 59),
    CronField("minute", 0, 59),
    CronField("hour", 0, 23),
    CronField("day", 1, 31),
    CronField("month", 1, 12, MONTHS),
    CronField("weekday", 0, 6, WEEKDAYS),
)


def scheduled_run_id(config: RunConfig) -> str:
    """Return the parameter run_id of a schedule. Raises InputError if the ids of its runs would be too long."""
    suffix = f"-{TIME_FIELD}"
    longest = longest_base(suffix) - max((len(f"-c{member.cycle}") for member in ensemble_members(config)), default=0)
    if len(config.run.id) > longest:
        raise InputError(
            f"longer than {longest} characters, and scheduled runs are named <run.id>-<time>",
            field="run.id",
            got=config.run.id,
            hint="Choose a shorter one with --set run.id=...",
        )
    return f"{config.run.id}{suffix}"


def kfp_cron(cron: str) -> str:
    """Return KFP's form of a cron expression of five fields, or of six with seconds first.

    Raises InputError if it is invalid, with the field's name.
    """
    if cron.startswith("@"):
        _check_descriptor(cron)
        return cron
    values = cron.split()
    if len(values) not in (5, 6):
        raise InputError(
            "must have five fields (minute hour day month weekday) or six (with seconds before them), such as "
            "'0 2 * * *' for every night at two (UTC)",
            field="--cron",
            got=cron,
        )
    values = ["0", *values] if len(values) == 5 else values
    for field, value in zip(FIELDS, values, strict=True):
        for item in value.split(","):
            if problem := _item_problem(field, item):
                raise InputError(f"{field.name}: {problem}", field="--cron", got=item)
    return " ".join(values)


def _check_descriptor(cron: str) -> None:
    name, _, duration = cron.partition(" ")
    if cron in DESCRIPTORS or (name == "@every" and _DURATION.fullmatch(duration)):
        return
    hint = f"Choose one of {', '.join(DESCRIPTORS)}, or an interval such as '@every 6h30m'."
    raise InputError("unknown descriptor", field="--cron", got=cron, hint=hint)


def _item_problem(field: CronField, item: str) -> str:
    """Return the problem of one item of a field, such as `*/15` or `mon-fri`; empty if there is none."""
    extent, slash, step = item.partition("/")
    if slash and not (step.isascii() and step.isdigit() and int(step) > 0):
        return "the step after / must be a number above 0"
    if extent in ("*", "?"):
        return ""
    first, hyphen, last = extent.partition("-")
    begin, end = _parse_value(field, first), _parse_value(field, last if hyphen else first)
    if begin is None or end is None:
        known = f"{field.low} to {field.high}" + (f" or {field.names[0]} to {field.names[-1]}" if field.names else "")
        return f"must be {known}"
    return "the range ends before it begins" if begin > end else ""


def _parse_value(field: CronField, text: str) -> int | None:
    """Return the number of a value; None if it is none or out of bounds."""
    if text.lower() in field.names:
        return field.low + list(field.names).index(text.lower())
    number = int(text) if text.isascii() and text.isdigit() else -1
    return number if field.low <= number <= field.high else None
