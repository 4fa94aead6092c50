"""Critical batch size: how far larger batches reduce the number of training steps to a target."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

LINEAR_SLOPE, USELESS_SLOPE = 0.8, 0.2
"""Slopes of log steps against log batch: linear at or above the first, useless at or below the second."""
FIT_ERROR = 0.25
"""Largest relative root-mean-square error of a usable fit."""


@dataclass(frozen=True)
class CriticalBatch:
    """Critical batch size of one line of a study.

    Args:
        batch: B_crit of the fit; None if there is no fit.
        least_steps: Limit of the steps for large batches.
        least_images: Limit of the images for small batches.
        error: Relative root-mean-square error of the fit.
        linear_to: Largest measured batch up to which steps fell nearly in proportion.
        useful_to: Measured batch beyond which steps hardly fell; None if they still did.
        reason: Cause if there is no fit.
    """

    batch: float | None = None
    least_steps: float = 0.0
    least_images: float = 0.0
    error: float = 0.0
    linear_to: int | None = None
    useful_to: int | None = None
    reason: str = ""


def critical_batch(steps: Mapping[int, float], failed: Sequence[int] = ()) -> CriticalBatch:
    """Fit the critical batch size to the mean number of steps to the target by batch.

    Fits (S / S_min - 1) (E / E_min - 1) = 1 with E = S B, which is S = S_min (1 + B_crit / B), B_crit = E_min / S_min
    (McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", section 2.3), by least squares of relative
    errors. At B_crit, steps and images are twice their minimum.

    Args:
        steps: Mean steps to the target, by batch.
        failed: Batches that did not reach the target.
    """
    batches = sorted(steps)
    linear, useful = _measured_limits({batch: steps[batch] for batch in batches})
    measured = CriticalBatch(linear_to=linear, useful_to=useful)
    if len(batches) < 3:
        reached = f"{len(batches)} of {len(batches) + len(failed)} batches reached the target"
        return replace(measured, reason=f"{reached}; a fit needs three")
    inverse = np.array([1.0 / batch for batch in batches])
    values = np.array([steps[batch] for batch in batches])
    rows = np.stack([np.ones_like(inverse), inverse], axis=1) / values[:, np.newaxis]
    (least_steps, least_images), *_ = np.linalg.lstsq(rows, np.ones_like(values), rcond=None)
    error = float(np.sqrt(np.mean((rows @ np.array([least_steps, least_images]) - 1.0) ** 2)))
    measured = replace(measured, error=error)
    if error > FIT_ERROR:
        reason = f"steps do not follow the model (relative error {error:.0%}), as if learning rates were not tuned"
        return replace(measured, reason=reason)
    if least_steps <= 0:
        reason = f"steps fall in proportion to the batch up to {batches[-1]:,}: the critical batch is larger"
        return replace(measured, reason=reason)
    if least_images <= 0:
        reason = f"steps do not fall as the batch grows from {batches[0]:,}: the critical batch is smaller"
        return replace(measured, reason=reason)
    batch = float(least_images / least_steps)
    return replace(measured, batch=batch, least_steps=float(least_steps), least_images=float(least_images))


def _measured_limits(steps: Mapping[int, float]) -> tuple[int | None, int | None]:
    """Return (linear_to, useful_to) from the slopes between neighbouring batches."""
    batches = list(steps)
    if len(batches) < 2:
        return None, None
    linear, useful = batches[0], None
    is_linear = True
    for small, large in pairwise(batches):
        slope = math.log(steps[small] / steps[large]) / math.log(large / small)
        is_linear = is_linear and slope >= LINEAR_SLOPE
        linear = large if is_linear else linear
        if slope > USELESS_SLOPE:
            useful = None
        elif useful is None:
            useful = small
    return linear, useful
