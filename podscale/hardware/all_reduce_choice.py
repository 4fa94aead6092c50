"""Choose the all-reduce algorithm and bucket size for a model's gradients, from links fitted to timed collectives."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from operator import attrgetter

import numpy as np

from podscale.hardware.collective_cost import ALGORITHMS, AffineCost, Fabric, LinkAxis

BUCKET_SIZES_MB = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
MIN_ADVANTAGE = 0.95
"""Largest fraction of the time of `flat` at which another algorithm is chosen: the cost model is not exact."""


@dataclass(frozen=True)
class AllReduceChoice:
    """Algorithm and bucket size, with the predicted seconds of all buckets plus the last one, which nothing hides."""

    algorithm: str
    bucket_mb: float
    seconds: float


def choose_all_reduce(fabric: Fabric, gradient_bytes: int, algorithms: Sequence[str]) -> AllReduceChoice:
    """Return the fastest of `algorithms` with its bucket size, by the cost model.

    Many small buckets pay for latency; few large ones leave a long last bucket after backward. Therefore the time of
    all buckets plus one is minimised. Between equals the larger bucket wins.
    """
    candidates = [
        AllReduceChoice(name, bucket, _exposed_seconds(fabric, name, bucket, gradient_bytes))
        for name in algorithms
        for bucket in reversed(BUCKET_SIZES_MB)
    ]
    best = min(candidates, key=attrgetter("seconds"))
    flat = min((choice for choice in candidates if choice.algorithm == "flat"), key=attrgetter("seconds"), default=best)
    return best if best.seconds <= MIN_ADVANTAGE * flat.seconds else flat


def _exposed_seconds(fabric: Fabric, algorithm: str, bucket_mb: float, gradient_bytes: int) -> float:
    bucket = min(bucket_mb * 2**20, gradient_bytes)
    return (ceil(gradient_bytes / bucket) + 1) * ALGORITHMS[algorithm](fabric, bucket)


MIN_LATENCY, MIN_PER_BYTE = 1e-7, 1e-13
"""Lower bounds of a fit, seconds and seconds per byte: a fit of noisy times may be zero."""


def fit_affine_cost(sizes: Sequence[int], seconds: Sequence[float]) -> AffineCost:
    """Fit a cost without negative parts to the seconds of messages by size in bytes.

    Minimises the squares of the relative errors. With absolute errors, the noise of the largest message would hide the
    latency.
    """
    size, time = np.asarray(sizes, float), np.asarray(seconds, float)
    rows = np.stack([1 / time, size / time], axis=1)
    one = np.ones(len(size))
    (fixed, per_byte), *_ = np.linalg.lstsq(rows, one, rcond=None)
    if fixed < 0:  # noise: the nearest possible fit goes through the origin
        fixed, per_byte = 0.0, np.linalg.lstsq(rows[:, 1:], one, rcond=None)[0][0]
    elif per_byte <= 0:  # too small messages to measure bandwidth: the largest one gives a lower bound
        fixed, per_byte = time.min(), time[-1] / size[-1]
    return AffineCost(float(fixed), float(per_byte))


def fit_link_axis(ranks: int, sizes: Sequence[int], seconds: Sequence[float]) -> LinkAxis:
    """Fit the links of an axis to the seconds of ring all-reduces over `ranks`, by size in bytes."""
    if ranks == 1:
        return LinkAxis(1, MIN_LATENCY, MIN_PER_BYTE)
    line, unit = fit_affine_cost(sizes, seconds), LinkAxis(ranks, 1.0, 1.0).all_reduce()
    latency, per_byte = line.fixed / unit.fixed, line.per_byte / unit.per_byte
    return LinkAxis(ranks, max(latency, MIN_LATENCY), max(per_byte, MIN_PER_BYTE))
