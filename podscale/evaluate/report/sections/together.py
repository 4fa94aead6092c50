"""Several models evaluated together: members, their disagreement, what combining them brings and costs."""

from collections.abc import Iterator
from typing import NamedTuple

from podscale.evaluate.ensemble import Answered, Ensemble, SingleModel
from podscale.evaluate.report import figures
from podscale.evaluate.report.gather import ReportData
from podscale.evaluate.report.sections.parts import section
from podscale.evaluate.report.svg import Markup, tag

WAYS = {
    "probabilities": "mean of probabilities",
    "logits": "mean of logits",
    "weights": "mean of weights, one model",
}
COLUMNS = ("", "top-1", "95 % interval", "top-5", "loss", "epochs", "passes", "images/s")
SAME_EPOCHS = 0.01
"""Relative difference up to which two trainings count as equally long."""


class Row(NamedTuple):
    """One line of the table; epochs: trained in all until then."""

    name: str
    answered: Answered
    epochs: float
    chosen: bool = False


def together(data: ReportData) -> Markup | None:
    """Members, ensemble and the single model beside them, and a table of disagreements."""
    found = data.evaluation.ensemble if data.evaluation else None
    if found is None:
        return None
    lines = [
        tag("tr", [tag("td", cell, class_="n" if i else None) for i, cell in enumerate(_cells(row))],
            class_="chosen" if row.chosen else None)
        for row in rows(found)
    ]  # fmt: skip
    head = tag("tr", [tag("th", name, class_="n" if i else None) for i, name in enumerate(COLUMNS)])
    table = tag("table", tag("thead", head), tag("tbody", lines))
    notes = [tag("p", sentence, class_="note") for sentence in remarks(found)]
    return section("Ensemble", table, *notes, _disagreement(found))


def rows(found: Ensemble) -> Iterator[Row]:
    """Members, ways of combining them, and the single model."""
    for member in found.members:
        yield Row(_name(member), member.answered, member.epochs_before + member.epochs)
        if member.average is not None:
            yield Row(f"{_name(member)}, running average", member.average, member.epochs_before + member.epochs)
    for one in found.combined:
        yield Row(WAYS[one.way], one.answered, found.epochs, chosen=one.way == found.combine)
    if (single := found.baseline) is not None:
        yield Row(f"single model {single.name}", single.answered, single.epochs_before + single.epochs)


def remarks(found: Ensemble) -> Iterator[str]:
    """What the table does not say by itself."""
    yield (
        f"Epochs are those trained until then, what the members have in common once: {found.epochs:g} for all of them. "
        f"The figures of this report are of the {WAYS[found.combine]}."
    )
    single = found.baseline
    if single is not None:
        own = single.epochs_before + single.epochs
        if abs(own - found.epochs) <= SAME_EPOCHS * found.epochs:
            yield f"The single model {single.name} was trained as long ({own:g} epochs), in one go."
        else:
            yield (
                f"The single model {single.name} was trained for {own:g} epochs, the ensemble for {found.epochs:g}: "
                "the two do not compare at equal training."
            )
    cost = next((one.statistics_seconds for one in found.combined if one.statistics_seconds), None)
    if cost is not None:
        yield f"Batch norm's statistics of the mean weights took {cost:.2g} s over training images, once."


def as_text(found: Ensemble) -> str:
    """The table for a terminal."""
    cells = [list(COLUMNS), *(_cells(row) for row in rows(found))]
    widths = [max(len(line[i]) for line in cells) for i in range(len(COLUMNS))]
    rules = [f"<{widths[0]}", *(f">{width}" for width in widths[1:])]
    return "\n".join("  ".join(f"{cell:{rule}}" for cell, rule in zip(line, rules, strict=True)) for line in cells)


def _cells(row: Row) -> list[str]:
    low, high = row.answered.top1_interval
    return [
        row.name,
        figures.percent(row.answered.top1, 2),
        f"{100 * low:.1f} to {100 * high:.1f}",
        figures.percent(row.answered.top5, 2),
        figures.decimal(row.answered.loss, 4),
        f"{row.epochs:g}",
        str(row.answered.passes),
        figures.rate(row.answered.images_per_second),
    ]


def _name(member: SingleModel) -> str:
    """The member's run, and the epoch of its snapshot."""
    if member.started_epoch is None:
        return member.name
    return f"{member.name}, from epoch {member.started_epoch:g} of {member.started_from}"


def _disagreement(found: Ensemble) -> Markup:
    names = [member.name for member in found.members]
    head = tag("tr", tag("th"), [tag("th", name, class_="n") for name in names])
    lines = [
        tag("tr", tag("td", name), [tag("td", figures.ABSENT if i == j else figures.percent(share, 2), class_="n")
                                    for j, share in enumerate(shares)])
        for i, (name, shares) in enumerate(zip(names, found.disagreement, strict=True))
    ]  # fmt: skip
    caption = tag("figcaption", tag("b", "Disagreement"), ": share of images whose first guesses differ")
    return tag(
        "figure", caption, tag("table", tag("thead", head), tag("tbody", lines), class_="compact"), class_="panel"
    )
