"""Figures over seeds: spread, differences that noise may explain, and the critical batch size.

Shares are numbers from 0 to 1; texts give them in percent and points.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

T_95 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26, 10: 2.23, 15: 2.13, 30: 2.04}
"""Two-sided 95 % quantiles of Student's t by degrees of freedom; between them the one before is taken."""
PERFECT_SLOPE, USELESS_SLOPE = 0.8, 0.2
"""Share of a doubling that must come off the updates to call it (nearly) linear, or without use."""
FIT_ERROR = 0.25
"""A relative error of the fit, root mean square, above which it says nothing."""


def student_95(free: int) -> float:
    """The two-sided 95 % quantile of Student's t with `free` degrees of freedom, at least 1."""
    return T_95[max(known for known in T_95 if known <= free)]


def mean_deviation(values: Sequence[float]) -> tuple[float, float]:
    """Mean and sample standard deviation (0 of a single one)."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def mean_deviation_percent(values: Sequence[float]) -> str:
    """Mean and standard deviation of shares, in percent."""
    if not values:
        return "none"
    deviation = f" \u00b1 {100 * statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{100 * statistics.fmean(values):.2f}{deviation} %"


@dataclass(frozen=True)
class MeanDifference:
    """Of two means, with the half width of its 95 % interval (Student's t, pooled variance); None of single values."""

    value: float
    half_width: float | None

    @property
    def is_noise(self) -> bool:
        """Whether there is an interval and it holds 0."""
        return self.half_width is not None and abs(self.value) <= self.half_width

    def __str__(self) -> str:
        points = f"{100 * self.value:+.2f}"
        if self.half_width is None:
            return points
        return f"{points} \u00b1 {100 * self.half_width:.2f}{' (within noise)' if self.is_noise else ''}"


def mean_difference(first: Sequence[float], values: Sequence[float]) -> MeanDifference | None:
    """Mean of `values` less mean of `first`; None where one is empty."""
    if not first or not values:
        return None
    between = statistics.fmean(values) - statistics.fmean(first)
    if min(len(first), len(values)) < 2:
        return MeanDifference(between, None)
    free = len(first) + len(values) - 2
    squares = sum((v - statistics.fmean(group)) ** 2 for group in (first, values) for v in group)
    error = math.sqrt(squares / free * (1 / len(first) + 1 / len(values)))
    return MeanDifference(between, student_95(free) * error)


@dataclass(frozen=True)
class CriticalBatch:
    """How far larger batches save updates.

    batch: B_crit of the fit, at which half of the possible saving is used up; None where `reason` says why there is no
    fit. least_updates, least_images: what the fit tends to at very large and at very small batches. error: relative,
    root mean square. linear_to: the largest batch up to which every step to the next measured one saved nearly in
    proportion; useful_to: the largest one after which it saved (nearly) nothing any more, None where it still did.
    """

    batch: float | None = None
    least_updates: float = 0.0
    least_images: float = 0.0
    error: float = 0.0
    linear_to: int | None = None
    useful_to: int | None = None
    reason: str = ""


def critical_batch(updates: Mapping[int, float], absent: Sequence[int] = ()) -> CriticalBatch:
    """From the mean updates to the target by batch; absent: batches that did not reach it.

    Fits (S / S_min - 1) (E / E_min - 1) = 1 with E = S B, which is S = S_min (1 + B_crit / B), B_crit = E_min / S_min
    (McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", section 2.3), by least squares of relative
    errors. At B_crit, doubling the batch divides the updates by 4/3, and both are twice their least.
    """
    batches = sorted(updates)
    linear, useful = _measured_limits({batch: updates[batch] for batch in batches})
    measured = CriticalBatch(linear_to=linear, useful_to=useful)
    if len(batches) < 3:
        known = f"{len(batches)} of {len(batches) + len(absent)} batches reached the target"
        return replace(measured, reason=f"{known}; a fit needs three")
    inverse = np.array([1.0 / batch for batch in batches])
    seen = np.array([updates[batch] for batch in batches])
    rows = np.stack([np.ones_like(inverse), inverse], axis=1) / seen[:, np.newaxis]
    (least, images), *_ = np.linalg.lstsq(rows, np.ones_like(seen), rcond=None)
    error = float(np.sqrt(np.mean((rows @ np.array([least, images]) - 1.0) ** 2)))
    if error > FIT_ERROR:
        reason = f"updates do not follow the model (relative error {error:.0%}); a rate that is not tuned does that"
        return replace(measured, error=error, reason=reason)
    if least <= 0:
        reason = f"updates fall in proportion to the batch up to {batches[-1]:,}: the critical batch is larger"
        return replace(measured, error=error, reason=reason)
    if images <= 0:
        reason = f"updates do not fall as the batch grows from {batches[0]:,}: the critical batch is smaller"
        return replace(measured, error=error, reason=reason)
    return replace(
        measured, batch=float(images / least), least_updates=float(least), least_images=float(images), error=error
    )


def _measured_limits(updates: Mapping[int, float]) -> tuple[int | None, int | None]:
    """(linear_to, useful_to) by the slope of log updates against log batch between neighbours."""
    batches = list(updates)
    if len(batches) < 2:
        return None, None
    linear, useful = batches[0], None
    still = True
    for small, large in pairwise(batches):
        saved = math.log(updates[small] / updates[large]) / math.log(large / small)
        still = still and saved >= PERFECT_SLOPE
        linear = large if still else linear
        if saved > USELESS_SLOPE:
            useful = None
        elif useful is None:
            useful = small
    return linear, useful
