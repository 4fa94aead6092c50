"""Choose the all-reduce algorithm and bucket size for a model's gradients, from measured links.

Latency and bandwidth of the links are fitted to a few timed collectives.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np

from podscale.hardware.collective_cost import ALGORITHMS, AffineCost, Fabric, LinkAxis

BUCKET_SIZES_MB = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
MIN_ADVANTAGE = 0.95
"""Another algorithm than the backend's own must promise this share of its time: the model is not the network."""


@dataclass(frozen=True)
class AllReduceChoice:
    """seconds: predicted for all buckets and, once more, the last one, of whose time nothing hides."""

    algorithm: str
    bucket_mb: float
    seconds: float


def choose_all_reduce(fabric: Fabric, gradient_bytes: int, algorithms: Sequence[str]) -> AllReduceChoice:
    """The fastest combination of one of `algorithms` and a size of buckets, by the cost model.

    Many small buckets pay for latency, few large ones leave a long last bucket after backward has ended: what is
    minimised is the time of all buckets plus that of one. Between equals the larger bucket wins.
    """
    candidates = [
        AllReduceChoice(name, bucket, _exposed_seconds(fabric, name, bucket, gradient_bytes))
        for name in algorithms
        for bucket in reversed(BUCKET_SIZES_MB)
    ]
    best = min(candidates, key=_predicted_seconds)
    own = min((choice for choice in candidates if choice.algorithm == "flat"), key=_predicted_seconds, default=best)
    return best if best.seconds <= MIN_ADVANTAGE * own.seconds else own


def _exposed_seconds(fabric: Fabric, algorithm: str, bucket_mb: float, gradient_bytes: int) -> float:
    bucket = min(bucket_mb * 2**20, gradient_bytes)
    return (ceil(gradient_bytes / bucket) + 1) * ALGORITHMS[algorithm](fabric, bucket)


def _predicted_seconds(choice: AllReduceChoice) -> float:
    return choice.seconds


MIN_LATENCY, MIN_PER_BYTE = 1e-7, 1e-13
"""A fit of noisy times may come out at zero: no link is faster than 0.1 us or 10 TB/s."""


def fit_affine_cost(sizes: Sequence[int], seconds: Sequence[float]) -> AffineCost:
    """The affine function through times by size, by least squares of the *relative* error, neither part negative.

    Relative, because otherwise the largest message alone would decide and latency would drown in its noise.
    """
    size, time = np.asarray(sizes, float), np.asarray(seconds, float)
    rows = np.stack([1 / time, size / time], axis=1)
    one = np.ones(len(size))
    (fixed, per_byte), *_ = np.linalg.lstsq(rows, one, rcond=None)
    if fixed < 0:  # noise: the nearest fit that a link can have goes through the origin
        fixed, per_byte = 0.0, np.linalg.lstsq(rows[:, 1:], one, rcond=None)[0][0]
    elif per_byte <= 0:  # no bandwidth was seen: what the largest message got is the least there is
        fixed, per_byte = time.min(), time[-1] / size[-1]
    return AffineCost(float(fixed), float(per_byte))


def fit_link_axis(ranks: int, sizes: Sequence[int], seconds: Sequence[float]) -> LinkAxis:
    """The axis on which all-reduces of these sizes (bytes), by a ring over `ranks`, took these times."""
    if ranks == 1:
        return LinkAxis(1, MIN_LATENCY, MIN_PER_BYTE)
    line, unit = fit_affine_cost(sizes, seconds), LinkAxis(ranks, 1.0, 1.0).all_reduce()
    latency, per_byte = line.fixed / unit.fixed, line.per_byte / unit.per_byte
    return LinkAxis(ranks, max(latency, MIN_LATENCY), max(per_byte, MIN_PER_BYTE))
