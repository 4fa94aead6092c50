"""Clocks and statistics that benchmarks share."""

import os
import random
import resource
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, sqrt
from pathlib import Path

from podscale.study.seed_statistics import student_95

NORMAL_95 = 1.96


def cpu_seconds(*, children: bool = False) -> float:
    """Return the CPU seconds (user and system) of this process, or of its children that have exited."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN if children else resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def resident_bytes() -> int:
    """Return the present resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def rate(count: float, seconds: float) -> float:
    """Return the count a second, for times from one microsecond on."""
    return count / max(seconds, 1e-6)


def median_interval(values: Sequence[float], resamples: int = 4000) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the median."""
    generator = random.Random(1)
    medians = sorted(statistics.median(generator.choices(values, k=len(values))) for _ in range(resamples))
    return medians[int(0.025 * resamples)], medians[int(0.975 * resamples)]


def median_ratio(values: Sequence[float], base: Sequence[float]) -> float:
    """Return the median over rounds of the ratio of two measurements of the same round."""
    return statistics.median(value / other for value, other in zip(values, base, strict=True))


@dataclass(frozen=True)
class MeanInterval:
    """Mean with the half width of its 95 % interval (Student's t); None for a single value."""

    mean: float
    half: float | None
    deviation: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "MeanInterval":
        mean = statistics.fmean(values)
        if len(values) < 2:
            return cls(mean, None, 0.0)
        deviation = statistics.stdev(values)
        return cls(mean, student_95(len(values) - 1) * deviation / sqrt(len(values)), deviation)

    @property
    def bounds(self) -> tuple[float, float]:
        half = self.half or 0.0
        return self.mean - half, self.mean + half

    @property
    def sign(self) -> int:
        """1 or -1 if the interval excludes 0, else 0."""
        if self.half is None or abs(self.mean) <= self.half:
            return 0
        return 1 if self.mean > 0 else -1

    def samples_needed(self, half: float) -> int:
        """Return the approximate number of values for an interval of this half width."""
        return max(2, ceil((NORMAL_95 * self.deviation / half) ** 2))

    def format(self, digits: int = 2, sign: str = "+") -> str:
        text = f"{self.mean:{sign}.{digits}f}"
        return text if self.half is None else f"{text} ± {self.half:.{digits}f}"
