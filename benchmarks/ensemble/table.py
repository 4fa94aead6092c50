"""The page about the comparison: its text, the table of each family, and what the differences say."""

import textwrap
from collections.abc import Mapping, Sequence

from benchmarks.ensemble.cases import Comparison, Family
from benchmarks.ensemble.rows import (
    BEST,
    CYCLES,
    ENDING,
    LAST,
    LONG,
    MEAN,
    RESTARTS,
    TOGETHER,
    WEIGHTS,
    Row,
    Spread,
    against,
    over,
    points,
)

CLAIM = 0.5
"""Points by which the ensemble is said to beat a single model."""
PUBLISHED_ERROR = 23.0
"""Percent of errors that the single model is said to have."""

PAPER = """
Codreanu 2017 claims 77.5 % top-1 on ImageNet for a collapsed ensemble of ResNet-50, where regular runs of 90 to 120
epochs reach up to 77 %, for the same fixed amount of training. How many members and epochs that took, and how members
were combined, we have not found (docs/ensemble.md). Half a point is one in 46 of that model's errors.
"""
SIDES = """
Here every side takes the same epochs of training in all. **The ensemble**: one run in cycles, a collapse from the
snapshot of each, evaluated together; what members share counts once. **One long run**: the same document without the
ensemble, its decay over the whole length. **One that ends in a collapse**: the same, but its last epochs are the
collapse of a member (rate, decay, crops). **Restarts**: as many independent runs as members, each so much shorter, its
warm-up too. The mean of the weights (SWA, Izmailov 2018) has batch-norm statistics of its own; the running average
(EMA) is of the last updates, decay 0.95, and costs no epochs.
"""
READING = """
Top-1 and loss are means over seeds with half a 95 % interval (Student's t). A seed changes initial weights, order and
crops; the sides of a seed begin alike, only members and restarts with seeds of their own, so that differences are
paired. `Best member` is chosen by the images that judge it, and flattered by that. The split is one and the same:
intervals say nothing of other images. One process, one thread.
"""


def introduction() -> list[str]:
    """Text before the families."""
    return [line for text in (PAPER, SIDES, READING) for line in (*_wrapped(text), "")]


def section(family: Family, sides: Comparison, by_seed: Sequence[Mapping[str, Row]], picture: str) -> list[str]:
    """Section of a family. by_seed: the rows of each seed that is complete."""
    head = [f"## {family.title}", "", *_wrapped(family.about), "", *_wrapped(_lengths(sides)), ""]
    return [
        *head,
        *_table(by_seed),
        "",
        f"![Differences to one long run]({picture})",
        "",
        *_contrasts(by_seed),
        "",
    ]


def _lengths(sides: Comparison) -> str:
    cycles, collapse = sides.cycles.ensemble.cycles, sides.cycles.ensemble.collapse.epochs
    count = len(sides.members)
    return (
        f"{sides.epochs:g} epochs each: cycles of {', '.join(f'{length:g}' for length in cycles)} and {count} "
        f"collapses of {collapse:g}; {sides.epochs:g} in one go; {sides.epochs - collapse:g} and a collapse of "
        f"{collapse:g}; {count} restarts of {sides.restarts[0].train.epochs:.2f}."
    )


def _table(by_seed: Sequence[Mapping[str, Row]]) -> list[str]:
    lines = [
        "| | epochs | passes | top-1, % | loss, nats | top-1 more than one long run's |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, row in by_seed[0].items():
        top1, loss = Spread.of(over(by_seed, name, points)), Spread.of(over(by_seed, name, _loss))
        more = "" if name == LONG else _signed(Spread.of(against(by_seed, name, LONG, points)))
        lines.append(f"| {name} | {row.epochs:.3g} | {row.passes} | {_plain(top1, 2)} | {_plain(loss, 3)} | {more} |")
    return [f"n = {len(by_seed)}:", "", *lines]


def _contrasts(by_seed: Sequence[Mapping[str, Row]]) -> list[str]:
    """The questions, one a row, and an answer in words."""
    lines = [
        "| question | points of top-1 | seeds better, equal, worse | loss, nats | seeds to see half a point |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, other in QUESTIONS:
        top1, loss = against(by_seed, name, other, points), Spread.of(against(by_seed, name, other, _loss))
        counts = [sum(1 for d in top1 if d > 0), sum(1 for d in top1 if d == 0), sum(1 for d in top1 if d < 0)]
        spread = Spread.of(top1)
        needed = str(spread.needed(CLAIM)) if len(by_seed) > 1 else ""
        better = ", ".join(map(str, counts))
        lines.append(f"| {name}, against {other} | {_signed(spread)} | {better} | {_signed(loss, 3)} | {needed} |")
    return [*lines, "", *_wrapped(_answer(by_seed))]


QUESTIONS = (
    (TOGETHER, LONG),
    (TOGETHER, ENDING),
    (TOGETHER, BEST),
    (TOGETHER, MEAN),
    (TOGETHER, RESTARTS),
    (TOGETHER, WEIGHTS),
    (WEIGHTS, LONG),
    (LAST, CYCLES),
)


def _answer(by_seed: Sequence[Mapping[str, Row]]) -> str:
    """Answer by the differences: what they are made of, and how many seeds would be needed."""
    if len(by_seed) < 2:
        return "One seed decides nothing."
    gain, member = (
        Spread.of(against(by_seed, TOGETHER, LONG, points)),
        Spread.of(against(by_seed, MEAN, LONG, points)),
    )
    averaging = Spread.of(against(by_seed, TOGETHER, MEAN, points))
    wrong = 100 - Spread.of(over(by_seed, LONG, points)).mean
    share = wrong * CLAIM / PUBLISHED_ERROR
    answer = {
        1: "**The effect appears**: the ensemble is better than one long run of as many epochs.",
        0: "**The effect does not appear**: ensemble and one long run of as many epochs cannot be told apart. The long "
        f"run errs on {wrong:.2f} % of the images, so that the published share of the errors, one in "
        f"{PUBLISHED_ERROR / CLAIM:.0f}, would be {share:.2f} points, which takes about {gain.needed(share):,} seeds, "
        "or a task with more errors and more images.",
        -1: "**The opposite appears**: the ensemble is worse than one long run of as many epochs. For the effect, "
        "cycles must be so long that a member loses less by its shorter training than the mean brings.",
    }[gain.sign]
    return (
        f"{answer} The difference of {_signed(gain)} points is made of {_signed(member)}, which a member loses by "
        f"having less training than the long run, and of {_signed(averaging)} by averaging the members."
    )


def _loss(row: Row) -> float:
    return row.loss


def _plain(spread: Spread, digits: int) -> str:
    return f"{spread.mean:.{digits}f}" + ("" if spread.half is None else f" ± {spread.half:.{digits}f}")


def _signed(spread: Spread, digits: int = 2) -> str:
    return f"{spread.mean:+.{digits}f}" + ("" if spread.half is None else f" ± {spread.half:.{digits}f}")


def _wrapped(text: str, width: int = 118) -> list[str]:
    """Lines of a paragraph, no wider than those around it."""
    return textwrap.wrap(text.strip(), width)
