"""Durations in rules: ranges, offsets, waits and lengths of time in seconds; all of them can be made shorter.

A drill cannot wait a quarter of an hour for each alert. With every duration divided by the same number a rule is the
shipped one, seen faster: limits, series and joins stay what they are.
"""

import re

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
