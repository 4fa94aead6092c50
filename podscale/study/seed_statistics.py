"""Statistics over the seeds of a study: mean, deviation, and the difference of two means with its interval.

Values are fractions; texts give them in percent and points.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

T_95 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26, 10: 2.23, 15: 2.13, 30: 2.04}
"""Two-sided 95 % quantiles of Student's t by degrees of freedom; other degrees use the next lower entry."""


def student_95(degrees: int) -> float:
    """Return the two-sided 95 % quantile of Student's t for at least 1 degree of freedom."""
    return T_95[max(known for known in T_95 if known <= degrees)]


def mean_deviation(values: Sequence[float]) -> tuple[float, float]:
    """Return mean and sample standard deviation (0 for a single value)."""
    return fmean(values), stdev(values) if len(values) > 1 else 0.0


def mean_deviation_percent(values: Sequence[float]) -> str:
    if not values:
        return "none"
    mean, deviation = mean_deviation(values)
    return f"{100 * mean:.2f} \u00b1 {100 * deviation:.2f} %" if len(values) > 1 else f"{100 * mean:.2f} %"


@dataclass(frozen=True)
class MeanDifference:
    """Difference of two means; `half_width` is that of the 95 % interval (Student's t), if known."""

    value: float
    half_width: float | None

    @property
    def is_noise(self) -> bool:
        """True if there is an interval and it contains 0."""
        return self.half_width is not None and abs(self.value) <= self.half_width

    def __str__(self) -> str:
        points = f"{100 * self.value:+.2f}"
        if self.half_width is None:
            return points
        return f"{points} \u00b1 {100 * self.half_width:.2f}{' (within noise)' if self.is_noise else ''}"


def mean_difference(first: Sequence[float], values: Sequence[float]) -> MeanDifference | None:
    """Return mean of `values` minus mean of `first`, by the pooled variance; None if one is empty."""
    if not first or not values:
        return None
    difference = fmean(values) - fmean(first)
    if min(len(first), len(values)) < 2:
        return MeanDifference(difference, None)
    degrees = len(first) + len(values) - 2
    squares = sum((v - fmean(group)) ** 2 for group in (first, values) for v in group)
    error = math.sqrt(squares / degrees * (1 / len(first) + 1 / len(values)))
    return MeanDifference(difference, student_95(degrees) * error)


def paired_difference(differences: Sequence[float]) -> MeanDifference:
    """Return the mean of the differences of pairs, with its 95 % interval; the values may also be ratios.

    Args:
        differences: one value a pair; not empty.
    """
    if len(differences) < 2 or not all(map(math.isfinite, differences)):
        return MeanDifference(fmean(differences), None)
    error = stdev(differences) / math.sqrt(len(differences))
    return MeanDifference(fmean(differences), student_95(len(differences) - 1) * error)
