"""Constants of NLCG (Adya 2018; the authors' program), shared by both engines, without a framework.

Step heuristic: the ratio of the loss to an earlier one selects a row of `rate_table`. The row has the factor of the
base rate, and the fraction of the last direction that is taken back.
"""

from typing import Literal, NamedTuple

EPS = 1e-8
LOSS_DECAY = 0.7
"""Decay of the running average of the loss."""
COMPARE_EVERY_STEPS = 5
"""Interval between comparisons of that average in mode `step`, steps."""
MIN_BASE_RATE, MAX_BASE_RATE = 1e-4, 1.0

RISES = (0.01, 0.025, 0.05, 0.075, 0.10, 0.125, 0.15)
"""Relative rises of the loss that separate the rows of the table; the tolerance multiplies them."""
SHRINKS = (1.0, 0.975, 0.95, 0.9, 0.8, 0.7, 0.5)
"""Factor of the base rate above each rise; below the first it grows."""
TAKE_BACK_FRACTIONS = (0.0, 0.1, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)
"""Fraction of the last direction that is taken back below the first rise, and above each."""
GROWTH = {"step": 1.05, "online": 1.02}

RateMode = Literal["step", "online", "none"]


class RateTable(NamedTuple):
    """Columns of the table. Row n, from 0, holds for ratios of the loss above n of the `limits`."""

    limits: tuple[float, ...]
    factors: tuple[float, ...]
    fractions: tuple[float, ...]


def rate_table(mode: RateMode, tolerance: float) -> RateTable:
    """Return the table of a mode; mode `none` does not use it.

    Args:
        tolerance: factor on `RISES`, above 0.
    """
    limits = tuple(1.0 + tolerance * rise for rise in RISES)
    return RateTable(limits, (GROWTH.get(mode, 1.0), *SHRINKS), TAKE_BACK_FRACTIONS)
