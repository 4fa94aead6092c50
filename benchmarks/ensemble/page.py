"""Page about the comparison: its text, and the table, the conclusion and the picture of each task."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.ensemble.cases import Comparison, Task
from benchmarks.ensemble.results import (
    BEST,
    CYCLES,
    ENDING,
    ENSEMBLE,
    LAST,
    LONG,
    MEAN,
    RESTARTS,
    WEIGHTS,
    ScoreRow,
    SeedRows,
    difference,
    points,
    values_of,
)
from benchmarks.measure import MeanInterval
from podscale.report.charts.lines import Scale, round_outwards
from podscale.report.charts.standalone import MARGIN_HEIGHT, standalone_svg
from podscale.report.markup import Markup, format_short, tag

CLAIM = 0.5
"""Points by which the paper's ensemble beats a single model."""
PUBLISHED_ERROR = 23.0
"""Top-1 error of the paper's single model, percent."""
WIDTH, LEFT, ROW, TOP, FOOT = 560.0, 236.0, 21.0, 40.0, 42.0
"""Sizes of the picture, pixels."""

PAPER = """
Codreanu 2017 claims 77.5 % top-1 on ImageNet for a collapsed ensemble of ResNet-50; with the same amount of training,
regular runs of 90 to 120 epochs reach up to 77 %. We do not know how many members and epochs that took, nor how members
were combined (docs/explanation/ensemble.md). Half a point is one in 46 of that model's errors.
"""
ALTERNATIVES = (
    "Here every alternative trains for the same number of epochs:",
    "- **The ensemble**: one run in cycles and a collapse from the snapshot of each cycle, evaluated together. Epochs "
    "that members share count once.",
    "- **One long run**: the same document without the ensemble, with the learning rate's decay over the whole length.",
    "- **One long run that ends in a collapse**: the same, but its last epochs are the collapse of a member (learning "
    "rate, weight decay, crops).",
    "- **Restarts**: as many independent runs as members, with epochs and warm-up divided by their number.",
    "The mean of the members' weights (SWA, Izmailov 2018) has its own batch-norm statistics. The running average "
    "(EMA) covers the last steps, with decay 0.95, and costs no epochs.",
)
READING = """
Top-1 and loss are means over seeds with half a 95 % interval (Student's t). A seed changes initial weights, order and
crops. The runs of a seed start alike, except that members and restarts have their own seeds, so differences are paired.
`Best member` is chosen by the validation images, which favours it. All seeds have the same split, so intervals do not
cover other images. One process, one thread.
"""


def introduction() -> list[str]:
    """Return the text before the tasks."""
    return [line for text in (PAPER, *ALTERNATIVES, READING) for line in (*_wrapped(text), "")]


def section(task: Task, comparison: Comparison, by_seed: SeedRows, picture_file: str) -> list[str]:
    """Return the section of a task."""
    return [
        f"## {task.title}",
        "",
        *_wrapped(task.about),
        "",
        *_wrapped(_lengths(comparison)),
        "",
        *_table(by_seed),
        "",
        f"![Differences to one long run]({picture_file})",
        "",
        *_contrasts(by_seed),
        "",
    ]


def _lengths(comparison: Comparison) -> str:
    ensemble, epochs = comparison.cycles.ensemble, comparison.epochs
    collapse, count = ensemble.collapse.epochs, len(comparison.members)
    return (
        f"{epochs:g} epochs each: cycles of {', '.join(f'{length:g}' for length in ensemble.cycles)} and {count} "
        f"collapses of {collapse:g}; {epochs:g} in one run; {epochs - collapse:g} and a collapse of {collapse:g}; "
        f"{count} restarts of {comparison.restarts[0].train.epochs:.2f}."
    )


def _table(by_seed: SeedRows) -> list[str]:
    lines = [
        "| | epochs | passes | top-1, % | loss, nats | top-1 more than one long run's |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, row in by_seed[0].items():
        top1, loss = MeanInterval.of(values_of(by_seed, name, points)), MeanInterval.of(values_of(by_seed, name, _loss))
        more = "" if name == LONG else MeanInterval.of(difference(by_seed, name, LONG, points)).format()
        cells = f"{top1.format(sign='')} | {loss.format(3, sign='')} | {more}"
        lines.append(f"| {name} | {row.epochs:.3g} | {row.passes} | {cells} |")
    return [f"n = {len(by_seed)}:", "", *lines]


def _contrasts(by_seed: SeedRows) -> list[str]:
    """Return the table of questions, one a row, and the conclusion."""
    lines = [
        "| question | points of top-1 | seeds better, equal, worse | loss, nats | seeds to see half a point |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, other in QUESTIONS:
        top1 = difference(by_seed, name, other, points)
        loss = MeanInterval.of(difference(by_seed, name, other, _loss)).format(3)
        counts = f"{sum(d > 0 for d in top1)}, {sum(d == 0 for d in top1)}, {sum(d < 0 for d in top1)}"
        mean = MeanInterval.of(top1)
        needed = str(mean.samples_needed(CLAIM)) if len(by_seed) > 1 else ""
        lines.append(f"| {name}, against {other} | {mean.format()} | {counts} | {loss} | {needed} |")
    return [*lines, "", *_wrapped(_conclusion(by_seed))]


QUESTIONS = (
    (ENSEMBLE, LONG),
    (ENSEMBLE, ENDING),
    (ENSEMBLE, BEST),
    (ENSEMBLE, MEAN),
    (ENSEMBLE, RESTARTS),
    (ENSEMBLE, WEIGHTS),
    (WEIGHTS, LONG),
    (LAST, CYCLES),
)


def _conclusion(by_seed: SeedRows) -> str:
    """Return the result, its parts, and the seeds that it would need."""
    if len(by_seed) < 2:
        return "One seed decides nothing."
    pairs = ((ENSEMBLE, LONG), (MEAN, LONG), (ENSEMBLE, MEAN))
    gain, member, averaging = (MeanInterval.of(difference(by_seed, *pair, points)) for pair in pairs)
    error = 100 - MeanInterval.of(values_of(by_seed, LONG, points)).mean
    share = error * CLAIM / PUBLISHED_ERROR
    result = {
        1: "**The effect appears**: the ensemble is better than one long run of as many epochs.",
        0: "**The effect does not appear**: these seeds show no difference between the ensemble and one long run of as "
        f"many epochs. The long run errs on {error:.2f} % of the images, so the published share of the errors, one in "
        f"{PUBLISHED_ERROR / CLAIM:.0f}, is {share:.2f} points here. To see it takes about "
        f"{gain.samples_needed(share):,} seeds, or a task with more errors and more images.",
        -1: "**The opposite appears**: the ensemble is worse than one long run of as many epochs. The effect needs "
        "cycles so long that a member loses less by its shorter training than averaging gains.",
    }[gain.sign]
    return (
        f"{result} The difference of {gain.format()} points is the sum of {member.format()} from the shorter training "
        f"of a member and {averaging.format()} from averaging the members."
    )


def _loss(row: ScoreRow) -> float:
    return row.loss


def _wrapped(text: str, width: int = 118) -> list[str]:
    return textwrap.wrap(text.strip(), width)


def picture(title: str, differences: Mapping[str, Sequence[float]]) -> str:
    """Draw the differences to one long run, in points, as SVG: a dot for every seed, and the mean with its interval."""
    means = {name: MeanInterval.of(values) for name, values in differences.items()}
    ends = [v for name, values in differences.items() for v in (*values, *means[name].bounds, 0.0)]
    x = Scale(*round_outwards(min(ends), max(ends)), LEFT, WIDTH - MARGIN_HEIGHT)
    bottom = TOP + ROW * len(differences)
    ticks = [
        (
            tag("line", x1=x(v), x2=x(v), y1=TOP, y2=bottom, class_="grid"),
            tag("text", format_short(v), x=x(v), y=bottom + 16, text_anchor="middle"),
        )
        for v in x.ticks(6)
    ]
    drawn = [
        _draw_row(name, values, means[name], x, TOP + ROW * (number + 0.5))
        for number, (name, values) in enumerate(differences.items())
    ]
    foot = "points of top-1 more than one long run; dots: seeds, bars: mean and 95 %"
    return standalone_svg(
        tag("text", title, x=MARGIN_HEIGHT, y=MARGIN_HEIGHT + 4, class_="title"),
        ticks,
        tag("line", x1=x(0.0), x2=x(0.0), y1=TOP, y2=bottom, class_="level"),
        drawn,
        tag("text", foot, x=WIDTH - MARGIN_HEIGHT, y=bottom + 34, text_anchor="end", class_="unit"),
        width=WIDTH,
        height=bottom + FOOT,
        enlarged=1.5,
    )


def _draw_row(name: str, values: Sequence[float], mean: MeanInterval, x: Scale, y: float) -> list[Any]:
    colour = f"c{(8, 3, 2)[mean.sign]}"
    low, high = mean.bounds
    dots: list[Markup] = [tag("circle", cx=x(v), cy=y + 5, r=2.2, class_="fill quiet") for v in values]
    return [
        tag("text", name, x=LEFT - 10, y=y + 4, text_anchor="end"),
        dots,
        tag("line", x1=x(low), x2=x(high), y1=y - 2, y2=y - 2, class_=f"bar {colour}"),
        tag(
            "circle", tag("title", f"{name}: {mean.format()}"), cx=x(mean.mean), cy=y - 2, r=4.0, class_=f"dot {colour}"
        ),
    ]
