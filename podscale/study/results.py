"""Results of a study: accuracy and steps to target by line and grid point, with their statistics over seeds.

The statistics are mean and deviation, differences with their confidence interval, and the critical batch size.
Fractions are numbers from 0 to 1; texts give them in percent and points.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from statistics import fmean
from typing import Any

import numpy as np

from podscale.study.document import BATCH_OPTION, StudyDocument
from podscale.study.grid import SweepSeries, TrialGrid
from podscale.study.records import GetRecord, TrialRecord

T_95 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26, 10: 2.23, 15: 2.13, 30: 2.04}
"""Two-sided 95 % quantiles of Student's t by degrees of freedom; others use the next lower entry."""
PERFECT_SLOPE, USELESS_SLOPE = 0.8, 0.2
"""Slopes of log steps against log batch: at or above the first a larger batch scales linearly, up to the second it
saves nothing."""
FIT_ERROR = 0.25
"""Largest relative root-mean-square error of a usable fit."""


def student_95(free: int) -> float:
    """Return the two-sided 95 % quantile of Student's t for `free` degrees of freedom, at least 1."""
    return T_95[max(known for known in T_95 if known <= free)]


def mean_deviation(values: Sequence[float]) -> tuple[float, float]:
    """Return mean and sample standard deviation (0 for a single value)."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def mean_deviation_percent(values: Sequence[float]) -> str:
    """Format mean and standard deviation of fractions, in percent."""
    if not values:
        return "none"
    deviation = f" \u00b1 {100 * statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{100 * statistics.fmean(values):.2f}{deviation} %"


@dataclass(frozen=True)
class MeanDifference:
    """Difference of two means.

    Args:
        half_width: of the 95 % interval (Student's t, pooled variance); None for single values.
    """

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
    """Return mean of `values` minus mean of `first`; None if one is empty."""
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
    """Critical batch size: how far larger batches reduce the number of training steps.

    Args:
        batch: B_crit of the fit, at which half of the possible saving is used up; None if there is no fit.
        least_updates: limit of the steps for very large batches.
        least_images: limit of the images for very small batches.
        error: relative root-mean-square error of the fit.
        linear_to: largest measured batch up to which steps fell nearly in proportion.
        useful_to: measured batch beyond which steps hardly fell; None if they still did.
        reason: cause if there is no fit.
    """

    batch: float | None = None
    least_updates: float = 0.0
    least_images: float = 0.0
    error: float = 0.0
    linear_to: int | None = None
    useful_to: int | None = None
    reason: str = ""


def critical_batch(updates: Mapping[int, float], absent: Sequence[int] = ()) -> CriticalBatch:
    """Fit the critical batch size to the mean number of steps to the target by batch.

    Fits (S / S_min - 1) (E / E_min - 1) = 1 with E = S B, which is S = S_min (1 + B_crit / B), B_crit = E_min / S_min
    (McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", section 2.3), by least squares of relative
    errors. At B_crit, doubling the batch divides the steps by 4/3; steps and images are twice their minimum.

    Args:
        updates: mean steps to the target, by batch.
        absent: batches that did not reach the target.
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
    """Return (linear_to, useful_to) from the slopes of log steps against log batch between neighbours."""
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


@dataclass(frozen=True)
class ResultGroup:
    """Trainings of one line at one grid point: all seeds at the chosen learning rate.

    Args:
        line: name of the line in charts and tables.
        x: value on the horizontal axis.
        rate: chosen learning rate; None until it is known.
        expected: number of trainings that the study requires.
        sweep_records: records of the sweep, by learning rate.
    """

    series: SweepSeries
    line: str
    x: Any
    rate: float | None
    records: Sequence[TrialRecord]
    expected: int
    sweep_records: dict[float, list[TrialRecord]]

    @cached_property
    def top1s(self) -> list[float]:
        """Top-1 of the trainings that did not diverge."""
        return [record.top1 for record in self.records if record.top1 is not None]

    @property
    def diverged(self) -> int:
        return sum(record.ended == "diverged" for record in self.records)

    @property
    def updates(self) -> int | None:
        done = [record.updates for record in self.records if record.ended == "done"]
        return max(done) if done else None

    @property
    def training_loss(self) -> float | None:
        losses = [record.training_loss for record in self.records if record.training_loss is not None]
        return fmean(losses) if losses else None

    def steps_to_target(self, target: float) -> list[tuple[float, float]]:
        """Return (steps, epochs) of the trainings that reached the target."""
        return [found for record in self.records if (found := record.steps_to_target(target)) is not None]

    def curve(self) -> list[tuple[float, float, float]]:
        """Return (epoch, mean, deviation) of top-1 over the trainings, at the evaluations that all of them have."""
        curves = [{point.step: point for point in record.curve} for record in self.records if record.top1 is not None]
        steps = set.intersection(*(set(curve) for curve in curves)) if curves else set()
        return [
            (curves[0][step].epoch, *mean_deviation([curve[step].top1 for curve in curves])) for step in sorted(steps)
        ]


@dataclass(frozen=True)
class StudyResults:
    """All result groups of a study, in the order of the document.

    Args:
        unfinished_trials: number of trials that remain to be run.
    """

    study: StudyDocument
    groups: Sequence[ResultGroup]
    unfinished_trials: int

    @property
    def lines(self) -> list[str]:
        return list(dict.fromkeys(group.line for group in self.groups))

    @property
    def xs(self) -> list[Any]:
        return list(dict.fromkeys(group.x for group in self.groups))

    def groups_of_line(self, line: str) -> list[ResultGroup]:
        return [group for group in self.groups if group.line == line]

    def groups_at(self, x: Any) -> list[ResultGroup]:
        return [group for group in self.groups if group.x == x]

    @property
    def has_numeric_axis(self) -> bool:
        """True if the horizontal axis has at least two values, all of them numbers."""
        return len(self.xs) > 1 and all(isinstance(x, int | float) and not isinstance(x, bool) for x in self.xs)

    @property
    def records(self) -> list[TrialRecord]:
        """Every record behind these results, once."""
        each = [records for group in self.groups for records in (group.records, *group.sweep_records.values())]
        return list({record.cell: record for records in each for record in records}.values())

    def critical_batch(self, line: str) -> CriticalBatch | None:
        """Return the critical batch of a line; None if the study has no target or does not vary the batch.

        A batch counts if every finished training reached the target.
        """
        target = self.study.target
        if target is None or self.study.axis_option != BATCH_OPTION or not self.has_numeric_axis:
            return None
        groups = [group for group in self.groups_of_line(line) if group.records]
        if not groups:
            return None
        complete = {
            group.series.batch: group for group in groups if len(group.steps_to_target(target)) == len(group.records)
        }
        means = {
            batch: fmean(updates for updates, _ in group.steps_to_target(target)) for batch, group in complete.items()
        }
        return critical_batch(means, [group.series.batch for group in groups if group.series.batch not in complete])

    def holds_up_to(self, line: str) -> Any:
        """Return the last x up to which no group of a line is significantly worse than its first.

        Returns None if there are too few seeds to estimate noise.
        """
        first, *others = self.groups_of_line(line)
        last = first.x if len(first.top1s) > 1 and any(len(group.top1s) > 1 for group in others) else None
        for group in others:
            found = mean_difference(first.top1s, group.top1s)
            if found is None or found.half_width is None or group.diverged or (found.value < 0 and not found.is_noise):
                break
            last = group.x
        return last


def study_results(grid: TrialGrid, get: GetRecord) -> StudyResults:
    """Collect the results from the records so far."""
    groups = [_build_group(grid.study, sweep, get) for sweep in grid.series]
    return StudyResults(grid.study, groups, len(grid.due_trials(get)) + len(grid.pending_trials(get)))


def _build_group(study: StudyDocument, series: SweepSeries, get: GetRecord) -> ResultGroup:
    others = [
        f"{name.rpartition('.')[2].replace('_', ' ')} {value}"
        for name, value in series.point
        if name != study.axis_option
    ]
    named = [series.variant.name] if len(study.variants) > 1 or not others else []
    rate = series.chosen_rate(get)
    trials = series.seed_trials(rate) if rate is not None else []
    tried = {
        rate: [found for trial in series.sweep_trials(rate) if (found := get(trial.key)) is not None]
        for rate in series.sweep_rates(get)
    }
    return ResultGroup(
        series,
        ", ".join([*named, *others]),
        dict(series.point).get(study.axis_option or ""),
        rate,
        [record for trial in trials if (record := get(trial.key)) is not None],
        len(study.seeds),
        {rate: records for rate, records in tried.items() if records},
    )
