"""From what the evaluations left to comparable rows, and to differences over seeds."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf, sqrt

from podscale.evaluation.ensemble_scores import EnsembleScores, ScoreSummary
from podscale.study.seed_statistics import student_95

LONG, AVERAGE = "one long run", "its running average"
ENDING = "one long run that ends in a collapse"
CYCLES = "the run in cycles, not collapsed"
LAST, BEST, MEAN = "last member", "best member", "members, one by one"
TOGETHER = "ensemble, mean of probabilities"
WEIGHTS = "mean of the members' weights (SWA)"
RESTARTS = "restarts, mean of probabilities"
WAYS = {"probabilities": TOGETHER, "logits": "ensemble, mean of logits", "weights": WEIGHTS}
APART_WEIGHTS = "mean of the restarts' weights"
APART = {"probabilities": RESTARTS, "logits": "restarts, mean of logits", "weights": APART_WEIGHTS}
NORMAL_95 = 1.96


@dataclass(frozen=True)
class Row:
    """One side with one seed. epochs: trained for it in all; passes: forward passes an image; loss in nats."""

    epochs: float
    passes: int
    top1: float
    loss: float


@dataclass(frozen=True)
class Spread:
    """A mean over seeds with the half width of its 95 % interval (Student's t); None of a single value."""

    mean: float
    half: float | None
    deviation: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        mean = statistics.fmean(values)
        if len(values) < 2:
            return cls(mean, None, 0.0)
        deviation = statistics.stdev(values)
        return cls(mean, student_95(len(values) - 1) * deviation / sqrt(len(values)), deviation)

    @property
    def sign(self) -> int:
        """1, -1, or 0 where the interval holds 0 or there is none."""
        if self.half is None or abs(self.mean) <= self.half:
            return 0
        return 1 if self.mean > 0 else -1

    def needed(self, half: float) -> int:
        """About how many seeds make the interval so narrow."""
        return max(2, ceil((NORMAL_95 * self.deviation / half) ** 2))


def rows(members: EnsembleScores, apart: EnsembleScores, singles: EnsembleScores) -> dict[str, Row]:
    """The rows of one seed by name, in the order of the table."""
    long, ending, cycles = singles.members
    found = {LONG: _row(long.answered, long.epochs)}
    if long.average is not None:
        found[f"{LONG}, {AVERAGE}"] = _row(long.average, long.epochs)
    found |= {ENDING: _row(ending.answered, ending.epochs), CYCLES: _row(cycles.answered, cycles.epochs)}
    *earlier, last = members.members
    for number, one in enumerate(earlier):
        found[f"member {number}"] = _row(one.answered, one.epochs_before + one.epochs)
    found[LAST] = _row(last.answered, last.epochs_before + last.epochs)
    if last.average is not None:
        found[f"{LAST}, {AVERAGE}"] = _row(last.average, last.epochs_before + last.epochs)
    found |= _group([one.answered for one in members.members], members.epochs, MEAN, BEST)
    found |= {WAYS[one.way]: _row(one.answered, members.epochs) for one in members.combined}
    found |= _group([one.answered for one in apart.members], apart.epochs, "restarts, one by one", "best restart")
    return found | {APART[one.way]: _row(one.answered, apart.epochs) for one in apart.combined}


def over(seen: Sequence[Mapping[str, Row]], name: str, value: Callable[[Row], float]) -> list[float]:
    """A value of a row, seed by seed."""
    return [value(one[name]) for one in seen]


def against(seen: Sequence[Mapping[str, Row]], name: str, other: str, value: Callable[[Row], float]) -> list[float]:
    """By how much a row is above another of the same seed, seed by seed."""
    return [a - b for a, b in zip(over(seen, name, value), over(seen, other, value), strict=True)]


def points(row: Row) -> float:
    """Top-1 in percent."""
    return 100 * row.top1


def differences(seen: Sequence[Mapping[str, Row]]) -> dict[str, list[float]]:
    """Of every row but the long run itself, points of top-1 more than that of the same seed."""
    return {name: against(seen, name, LONG, points) for name in seen[0] if name != LONG}


def _group(answers: Sequence[ScoreSummary], epochs: float, mean: str, best: str) -> dict[str, Row]:
    """Mean of several models, and the best of them by the images that judge it."""
    each = [_row(one, epochs) for one in answers]
    middle = Row(epochs, 1, statistics.fmean(r.top1 for r in each), statistics.fmean(r.loss for r in each))
    return {mean: middle, best: max(each, key=lambda row: (row.top1, -row.loss))}


def _row(answered: ScoreSummary, epochs: float) -> Row:
    return Row(epochs, answered.passes, answered.top1, inf if answered.loss is None else answered.loss)
