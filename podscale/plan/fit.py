"""Latency and bandwidth of links from a few timed collectives."""

from collections.abc import Sequence

import numpy as np

from podscale.plan.collectives import AffineCost, LinkAxis

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
