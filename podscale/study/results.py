"""What the records of a study say: accuracy and updates to the target of each line at each point of the grid.

Figures over seeds: spread, differences that noise may explain, and the critical batch size.

Shares are numbers from 0 to 1; texts give them in percent and points.
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


@dataclass(frozen=True)
class ResultGroup:
    """One line at one place: the trainings with every seed at the chosen rate.

    rate: None while it is not known. expected: trainings that the study asks for. sweep_records: records by rate of its
    sweep.
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
        """Of the trainings that did not diverge."""
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
        """(updates, epochs) of the trainings that came to the target."""
        return [found for record in self.records if (found := record.steps_to_target(target)) is not None]

    def curve(self) -> list[tuple[float, float, float]]:
        """(epoch, mean, deviation) of top-1 over the trainings, at the evaluations that all of them have."""
        curves = [{point.step: point for point in record.curve} for record in self.records if record.top1 is not None]
        steps = set.intersection(*(set(curve) for curve in curves)) if curves else set()
        return [
            (curves[0][step].epoch, *mean_deviation([curve[step].top1 for curve in curves])) for step in sorted(steps)
        ]


@dataclass(frozen=True)
class StudyResults:
    """All arms of a study by line, in the order of the document; `unfinished_trials`: cells that are still to be run."""

    study: StudyDocument
    groups: Sequence[ResultGroup]
    unfinished_trials: int

    @property
    def lines(self) -> list[str]:
        return list(dict.fromkeys(arm.line for arm in self.groups))

    @property
    def xs(self) -> list[Any]:
        return list(dict.fromkeys(arm.x for arm in self.groups))

    def groups_of_line(self, line: str) -> list[ResultGroup]:
        return [arm for arm in self.groups if arm.line == line]

    def groups_at(self, x: Any) -> list[ResultGroup]:
        return [arm for arm in self.groups if arm.x == x]

    @property
    def has_numeric_axis(self) -> bool:
        """Whether there is a horizontal axis: two numbers at least."""
        return len(self.xs) > 1 and all(isinstance(x, int | float) and not isinstance(x, bool) for x in self.xs)

    @property
    def records(self) -> list[TrialRecord]:
        """Every record that had a part in this, once."""
        each = [records for arm in self.groups for records in (arm.records, *arm.sweep_records.values())]
        return list({record.cell: record for records in each for record in records}.values())

    def critical_batch(self, line: str) -> CriticalBatch | None:
        """The critical batch of a line; None where the study counts no updates by batch.

        A batch counts where every training that ended reached the target.
        """
        target = self.study.target
        if target is None or self.study.axis_option != BATCH_OPTION or not self.has_numeric_axis:
            return None
        arms = [arm for arm in self.groups_of_line(line) if arm.records]
        if not arms:
            return None
        whole = {arm.series.batch: arm for arm in arms if len(arm.steps_to_target(target)) == len(arm.records)}
        means = {batch: fmean(updates for updates, _ in arm.steps_to_target(target)) for batch, arm in whole.items()}
        return critical_batch(means, [arm.series.batch for arm in arms if arm.series.batch not in whole])

    def holds_up_to(self, line: str) -> Any:
        """The last x up to which no arm of a line is worse than its first beyond noise; None where seeds are too few to
        know noise."""
        first, *others = self.groups_of_line(line)
        last = first.x if len(first.top1s) > 1 and any(len(arm.top1s) > 1 for arm in others) else None
        for arm in others:
            found = mean_difference(first.top1s, arm.top1s)
            if found is None or found.half_width is None or arm.diverged or (found.value < 0 and not found.is_noise):
                break
            last = arm.x
        return last


def study_results(grid: TrialGrid, get: GetRecord) -> StudyResults:
    """What the records say so far."""
    arms = [_build_group(grid.study, chain, get) for chain in grid.series]
    return StudyResults(grid.study, arms, len(grid.due_trials(get)) + len(grid.pending_trials(get)))


def _build_group(study: StudyDocument, series: SweepSeries, get: GetRecord) -> ResultGroup:
    others = [
        f"{name.rpartition('.')[2].replace('_', ' ')} {value}"
        for name, value in series.point
        if name != study.axis_option
    ]
    named = [series.variant.name] if len(study.variants) > 1 or not others else []
    rate = series.chosen_rate(get)
    cells = series.seed_trials(rate) if rate is not None else []
    tried = {
        rate: [found for cell in series.sweep_trials(rate) if (found := get(cell.key)) is not None]
        for rate in series.sweep_rates(get)
    }
    return ResultGroup(
        series,
        ", ".join([*named, *others]),
        dict(series.point).get(study.axis_option or ""),
        rate,
        [record for cell in cells if (record := get(cell.key)) is not None],
        len(study.seeds),
        {rate: records for rate, records in tried.items() if records},
    )
