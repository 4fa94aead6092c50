"""Accuracies over seeds: their spread, differences that noise may explain, what becomes of a line over its range."""

import math
import statistics
from collections.abc import Sequence

from learning_parts import SGD_AT_ITS_BEST, Arm, Groups
from trials import Records

T_95 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26, 10: 2.23}
"""Two-sided 95 % quantiles of Student's t by degrees of freedom."""


def top1s(arm: Arm, records: Records) -> list[float]:
    """Accuracies of an arm's trainings that ended well."""
    found = [records.get(trial) for trial in arm.trials]
    return [record.top1 for record in found if record is not None and record.top1 is not None]


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation of shares, in percent."""
    if not values:
        return "none"
    deviation = f" \u00b1 {100 * statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{100 * statistics.fmean(values):.2f}{deviation} %"


def difference(first: Sequence[float], values: Sequence[float]) -> str:
    """Difference of the means in points, with its 95 % interval (Student's t, pooled variance)."""
    if not first or not values:
        return ""
    points = 100 * (statistics.fmean(values) - statistics.fmean(first))
    free = len(first) + len(values) - 2
    if min(len(first), len(values)) < 2:
        return f"{points:+.2f}"
    squares = sum((v - statistics.fmean(group)) ** 2 for group in (first, values) for v in group)
    error = math.sqrt(squares / free * (1 / len(first) + 1 / len(values)))
    half = 100 * T_95[free] * error
    return f"{points:+.2f} \u00b1 {half:.2f}{'' if abs(points) > half else ' (within noise)'}"


def in_percent(shares: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation (0 of a single one)."""
    return 100 * statistics.fmean(shares), 100 * statistics.stdev(shares) if len(shares) > 1 else 0.0


def summary(groups: Groups, records: Records, x_name: str) -> list[str]:
    """Where a part draws several lines: each over the whole range, and at every place against SGD at its best rate."""
    arms = [arm for arms in groups.values() for arm in arms if top1s(arm, records)]
    lines = {
        name: {arm.x: top1s(arm, records) for arm in arms if name in arm.lines} for arm in arms for name in arm.lines
    }
    if len(lines) < 2:
        return []
    xs = sorted({arm.x for arm in arms})
    heads = [*(f"{x_name} {x:,g}" for x in xs), f"from {xs[0]:,g} to {xs[-1]:,g}"]
    return [
        f"Top-1 over the whole range; in brackets the difference from `{SGD_AT_ITS_BEST}` at the same {x_name}:",
        "",
        f"| | {' | '.join(heads)} |",
        f"|---|{'---:|' * len(heads)}",
        *(_row(name, found, lines.get(SGD_AT_ITS_BEST, {}), xs) for name, found in lines.items()),
        "",
    ]


def _row(name: str, found: dict[float, list[float]], peer: dict[float, list[float]], xs: Sequence[float]) -> str:
    cells = [spread(found.get(x, [])) for x in xs]
    if name != SGD_AT_ITS_BEST:
        against = [difference(peer.get(x, []), found.get(x, [])) for x in xs]
        cells = [f"{cell} [{other}]" if other else cell for cell, other in zip(cells, against, strict=True)]
    return f"| {' | '.join([name, *cells, difference(found.get(xs[0], []), found.get(xs[-1], []))])} |"
