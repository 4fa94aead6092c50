"""Verdict of a study by the criteria of its document: paired differences over the seeds, with their intervals."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from podscale.study.records import TrialRecord
from podscale.study.results import ResultGroup, StudyResults, paired_records
from podscale.study.sections import CriterionSection, OptionValues
from podscale.study.seed_statistics import MeanDifference, paired_difference
from podscale.study.sweep_series import format_option_value, short_option_name

Verdict = Literal["passed", "failed", "undecided", "reported", "premise-not-met", "not-run"]
"""Verdict of a criterion or a study.

`undecided`: the interval contains the threshold. `reported`: the criterion has no threshold. `premise-not-met`: the
study's premise failed, so its criteria decide nothing. `not-run`: trainings are missing.
"""


@dataclass(frozen=True)
class CriterionVerdict:
    """Result of one criterion.

    Args:
        name: Name of the criterion.
        criterion: Threshold in words.
        variant: Line of the results that the criterion is about, with its grid point.
        other: Line that it is compared with; "" until the selection has chosen among several.
        value: Mean paired difference of top-1 (a fraction), or mean ratio of steps; None if not run.
        half_width: Half of the 95 % interval of `value`.
        n: Number of pairs of trainings.
        sentence: Result in words.
    """

    name: str
    criterion: str
    verdict: Verdict
    premise: bool
    variant: str
    other: str
    measure: str
    value: float | None
    half_width: float | None
    n: int
    sentence: str


@dataclass(frozen=True)
class StudyVerdict:
    """Verdict of a study with that of each criterion."""

    verdict: Verdict
    sentence: str
    criteria: Sequence[CriterionVerdict]


def study_verdict(results: StudyResults) -> StudyVerdict:
    """Judge the criteria of a study by the records so far."""
    sections = results.study.criteria
    criteria = [judge_criterion(results, section) for section in sections]
    premises = [result.verdict for result in criteria if result.premise]
    decisive = [result for result, section in zip(criteria, sections, strict=True) if section.is_decisive]
    verdicts = [result.verdict for result in decisive or criteria]
    if any(verdict not in ("passed", "not-run") for verdict in premises):
        verdict: Verdict = "premise-not-met"
    elif "not-run" in premises or not criteria:
        verdict = "not-run"
    else:
        verdict = _any_verdict(verdicts) if results.study.passes == "any" else _all_verdict(verdicts)
    return StudyVerdict(verdict, _join_sentences(decisive or criteria), criteria)


def _join_sentences(criteria: Sequence[CriterionVerdict]) -> str:
    """Return the sentences of the criteria; of several, each with its verdict."""
    if len(criteria) == 1:
        return criteria[0].sentence
    return " ".join(
        f"{one.sentence.rstrip('.')}, {one.verdict}."
        if one.verdict in ("passed", "failed", "undecided")
        else one.sentence
        for one in criteria
    )


def _all_verdict(verdicts: Sequence[Verdict]) -> Verdict:
    """Return the verdict of a study whose criteria must all pass."""
    order: tuple[Verdict, ...] = ("failed", "not-run", "undecided", "reported")
    return next((verdict for verdict in order if verdict in verdicts), "passed")


def _any_verdict(verdicts: Sequence[Verdict]) -> Verdict:
    """Return the verdict of a study of whose criteria one must pass."""
    order: tuple[Verdict, ...] = ("passed", "not-run", "undecided", "reported")
    return next((verdict for verdict in order if verdict in verdicts), "failed")


def judge_criterion(results: StudyResults, criterion: CriterionSection) -> CriterionVerdict:
    """Judge one criterion by the records so far."""
    here, there = results.study.criterion_points(criterion)
    group = _group(results, criterion.variant, here)
    others = [_group(results, name, there) for name in criterion.others]
    other = _best_selected(others)
    pairs = [] if other is None else paired_records(group, other)
    values = [_measure(criterion, first, second) for first, second in pairs]
    missing = other is None or len(values) < min(group.expected, other.expected)
    difference = None if missing else paired_difference(values)
    verdict: Verdict = "not-run" if difference is None else _verdict(criterion, difference)
    labels = _label(results, group), "" if other is None else _label(results, other)
    if other is not None and group.series.variant is other.series.variant:
        labels = _point_label(group), _point_label(other)
    return CriterionVerdict(
        name=criterion.name,
        criterion=describe_threshold(criterion),
        verdict=verdict,
        premise=criterion.premise,
        variant=labels[0],
        other=labels[1],
        measure=criterion.measure,
        value=None if difference is None else _finite(difference.value),
        half_width=None if difference is None else _finite(difference.half_width),
        n=len(values),
        sentence=_sentence(criterion, labels, pairs, difference, group.expected),
    )


def curve_distances(results: StudyResults, criterion: CriterionSection) -> dict[float, float]:
    """Return the mean over the pairs of the absolute difference of top-1, by the epoch of each evaluation of all."""
    here, there = results.study.criterion_points(criterion)
    other = _best_selected([_group(results, name, there) for name in criterion.others])
    pairs = [] if other is None else paired_records(_group(results, criterion.variant, here), other)
    curves = [[{point.epoch: point.top1 for point in record.curve} for record in pair] for pair in pairs]
    epochs = set.intersection(*(set(curve) for pair in curves for curve in pair)) if curves else set[float]()
    return {epoch: statistics.fmean(abs(one[epoch] - two[epoch]) for one, two in curves) for epoch in epochs}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _group(results: StudyResults, variant: str, point: OptionValues) -> ResultGroup:
    """Return the results of a variant at a grid point."""
    return next(
        group for group in results.groups if group.series.variant.name == variant and dict(group.series.point) == point
    )


def _best_selected(groups: Sequence[ResultGroup]) -> ResultGroup | None:
    """Return the group with the best score in the selection; None until all are known."""
    if len(groups) == 1:
        return groups[0]
    scores = {group.series.name: group.selection_score for group in groups}
    if any(score is None for score in scores.values()):
        return None
    return max(groups, key=lambda group: scores[group.series.name] or ())


def _measure(criterion: CriterionSection, first: TrialRecord, second: TrialRecord) -> float:
    """Return the measure of a pair; a diverged training has top-1 0.

    A ratio of steps is infinite if the first does not reach the second's accuracy, and NaN if the second diverged.
    """
    if criterion.measure == "top1":
        return (first.top1 or 0.0) - (second.top1 or 0.0)
    goal = second.top1 or 0.0
    if goal <= 0:
        return math.nan
    reached, taken = (record.steps_to_target(goal) for record in (first, second))
    return math.inf if reached is None or taken is None else reached[0] / taken[0]


def _verdict(criterion: CriterionSection, difference: MeanDifference) -> Verdict:
    if not math.isfinite(difference.value) or difference.half_width is None:
        return "failed" if criterion.below is not None else "undecided"
    low, high = difference.value - difference.half_width, difference.value + difference.half_width
    if criterion.above is not None:
        return "passed" if low > criterion.above else "failed" if high <= criterion.above else "undecided"
    if criterion.below is not None:
        return "passed" if high < criterion.below else "failed" if low >= criterion.below else "undecided"
    if criterion.equal is not None:
        if not difference.is_noise:
            return "failed"
        return "passed" if difference.half_width <= criterion.equal else "undecided"
    return "reported"


def describe_threshold(criterion: CriterionSection) -> str:
    """Return the threshold of a criterion in words."""
    if criterion.measure == "steps":
        if criterion.above is not None:
            return f"ratio of steps > {criterion.above:g} at 95 %"
        return f"ratio of steps < {criterion.below:g} at 95 %" if criterion.below is not None else "ratio of steps"
    if criterion.above is not None:
        return f"difference > {100 * criterion.above:+g} points at 95 %"
    if criterion.below is not None:
        return f"difference < {100 * criterion.below:+g} points at 95 %"
    if criterion.equal is not None:
        return f"interval contains 0 and is at most \u00b1 {100 * criterion.equal:g} points"
    return "none: the difference is reported"


def _label(results: StudyResults, group: ResultGroup) -> str:
    return group.series.variant.name if len(results.groups) == len(results.study.variants) else group.series.name


def _point_label(group: ResultGroup) -> str:
    return ", ".join(f"{short_option_name(name)} {format_option_value(value)}" for name, value in group.series.point)


def _sentence(
    criterion: CriterionSection,
    labels: tuple[str, str],
    pairs: Sequence[tuple[TrialRecord, TrialRecord]],
    difference: MeanDifference | None,
    expected: int,
) -> str:
    versus = f"{labels[0]} against {labels[1] or ' or '.join(criterion.others)}"
    if difference is None:
        return f"{versus}: not yet run ({len(pairs)} of {expected} pairs)."
    n, half_width = f"(n = {len(pairs)})", difference.half_width or 0.0
    means = [100 * statistics.fmean(pair[side].top1 or 0.0 for pair in pairs) for side in (0, 1)]
    top1 = f"{labels[0]}: {means[0]:.1f} %, {labels[1]}: {means[1]:.1f} %"
    if criterion.measure == "top1":
        return f"{top1}, difference {100 * difference.value:+.1f} \u00b1 {100 * half_width:.1f} points {n}."
    if math.isfinite(difference.value):
        return f"{versus}: {difference.value:.2f} \u00b1 {half_width:.2f} of the steps {n}."
    if math.isnan(difference.value):
        return f"{top1}; the second diverged with a seed, so there is no accuracy to reach {n}."
    return f"{top1}; the first does not reach the accuracy of the second with every seed {n}."
