"""Clocks and statistics that benchmarks share."""

import random
import resource
import statistics
from collections.abc import Sequence


def cpu_seconds(*, children: bool = False) -> float:
    """CPU seconds (user and system) of all threads of this process.

    Args:
        children: of the processes that this one has waited for, and of theirs, instead.
    """
    used = resource.getrusage(resource.RUSAGE_CHILDREN if children else resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def rate(count: float, seconds: float) -> float:
    """Count a second; of less time than the clock can tell, of one tick of it."""
    return count / max(seconds, 1e-6)


def median_interval(values: Sequence[float], resamples: int = 4000) -> tuple[float, float]:
    """Bounds of the median in 95 % of resamples with replacement."""
    choose = random.Random(1)
    medians = sorted(statistics.median(choose.choices(values, k=len(values))) for _ in range(resamples))
    return medians[int(0.025 * resamples)], medians[int(0.975 * resamples)]


def median_ratio(values: Sequence[float], base: Sequence[float]) -> float:
    """Median over rounds of the ratio of two measurements of the same round."""
    return statistics.median(own / other for own, other in zip(values, base, strict=True))
