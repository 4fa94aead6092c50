"""Rows of the comparison from the evaluations of a seed, and their differences over seeds."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from podscale.evaluation.ensemble_scores import EnsembleScores, ScoreSummary

LONG, AVERAGE = "one long run", "its running average"
ENDING = "one long run that ends in a collapse"
CYCLES = "the run in cycles, not collapsed"
LAST, BEST, MEAN = "last member", "best member", "members, one by one"
ENSEMBLE = "ensemble, mean of probabilities"
WEIGHTS = "mean of the members' weights (SWA)"
RESTARTS = "restarts, mean of probabilities"
ENSEMBLE_ROWS = {"probabilities": ENSEMBLE, "logits": "ensemble, mean of logits", "weights": WEIGHTS}
RESTART_WEIGHTS = "mean of the restarts' weights"
RESTART_ROWS = {"probabilities": RESTARTS, "logits": "restarts, mean of logits", "weights": RESTART_WEIGHTS}


@dataclass(frozen=True)
class ScoreRow:
    """Scores of one alternative with one seed: epochs trained in all, forward passes an image, top-1, loss in nats."""

    epochs: float
    passes: int
    top1: float
    loss: float


SeedRows = Sequence[Mapping[str, ScoreRow]]
"""Rows by name, for each seed."""


def rows(members: EnsembleScores, restarts: EnsembleScores, singles: EnsembleScores) -> dict[str, ScoreRow]:
    """Return the rows of one seed by name, in the order of the table."""
    long, ending, cycles = singles.members
    by_name = {LONG: _row(long.answered, long.epochs)}
    if long.average is not None:
        by_name[f"{LONG}, {AVERAGE}"] = _row(long.average, long.epochs)
    by_name |= {ENDING: _row(ending.answered, ending.epochs), CYCLES: _row(cycles.answered, cycles.epochs)}
    *earlier, last = members.members
    for number, member in enumerate(earlier):
        by_name[f"member {number}"] = _row(member.answered, member.epochs_before + member.epochs)
    by_name[LAST] = _row(last.answered, last.epochs_before + last.epochs)
    if last.average is not None:
        by_name[f"{LAST}, {AVERAGE}"] = _row(last.average, last.epochs_before + last.epochs)
    by_name |= _mean_and_best([m.answered for m in members.members], members.epochs, MEAN, BEST)
    by_name |= {ENSEMBLE_ROWS[c.way]: _row(c.answered, members.epochs) for c in members.combined}
    by_name |= _mean_and_best(
        [m.answered for m in restarts.members], restarts.epochs, "restarts, one by one", "best restart"
    )
    return by_name | {RESTART_ROWS[c.way]: _row(c.answered, restarts.epochs) for c in restarts.combined}


def values_of(by_seed: SeedRows, name: str, value: Callable[[ScoreRow], float]) -> list[float]:
    """Return a value of a row, seed by seed."""
    return [value(seed_rows[name]) for seed_rows in by_seed]


def difference(by_seed: SeedRows, name: str, other: str, value: Callable[[ScoreRow], float]) -> list[float]:
    """Return the value of a row minus that of another row with the same seed, seed by seed."""
    return [value(seed_rows[name]) - value(seed_rows[other]) for seed_rows in by_seed]


def points(row: ScoreRow) -> float:
    """Return top-1 in percent."""
    return 100 * row.top1


def differences(by_seed: SeedRows) -> dict[str, list[float]]:
    """Return the top-1 of every other row minus that of the long run, in points, seed by seed."""
    return {name: difference(by_seed, name, LONG, points) for name in by_seed[0] if name != LONG}


def _mean_and_best(scores: Sequence[ScoreSummary], epochs: float, mean: str, best: str) -> dict[str, ScoreRow]:
    models = [_row(score, epochs) for score in scores]
    mean_row = ScoreRow(epochs, 1, statistics.fmean(r.top1 for r in models), statistics.fmean(r.loss for r in models))
    return {mean: mean_row, best: max(models, key=lambda row: (row.top1, -row.loss))}


def _row(scores: ScoreSummary, epochs: float) -> ScoreRow:
    return ScoreRow(epochs, scores.passes, scores.top1, inf if scores.loss is None else scores.loss)
