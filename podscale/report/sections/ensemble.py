"""Ensemble section: members, their disagreement, and accuracy and cost of each way of combining them."""

from collections.abc import Iterator
from typing import NamedTuple

from podscale.evaluation.ensemble_scores import EnsembleScores, ScoreSummary, SingleModel
from podscale.report import markup
from podscale.report.markup import Markup, section_tag, tag
from podscale.report.report_data import ReportData

METHOD_TITLES = {
    "probabilities": "mean of probabilities",
    "logits": "mean of logits",
    "weights": "mean of weights, one model",
}
TABLE_COLUMNS = ("", "top-1", "95 % interval", "top-5", "loss", "epochs", "passes", "images/s")
EPOCH_TOLERANCE = 0.01
"""Largest relative difference between trainings that count as equally long."""


class ModelRow(NamedTuple):
    """One row of the table.

    Args:
        epochs: total epochs trained for it.
    """

    name: str
    answered: ScoreSummary
    epochs: float
    chosen: bool = False


def ensemble_section(data: ReportData) -> Markup | None:
    """Render members, ensemble and single model, and a table of disagreements."""
    found = data.evaluation.ensemble if data.evaluation else None
    if found is None:
        return None
    lines = [
        tag(
            "tr",
            [tag("td", cell, class_="n" if i else None) for i, cell in enumerate(_cells(row))],
            class_="chosen" if row.chosen else None,
        )
        for row in model_rows(found)
    ]
    head = tag("tr", [tag("th", name, class_="n" if i else None) for i, name in enumerate(TABLE_COLUMNS)])
    table = tag("table", tag("thead", head), tag("tbody", lines))
    notes = [tag("p", sentence, class_="note") for sentence in ensemble_remarks(found)]
    return section_tag("Ensemble", table, *notes, _disagreement_table(found))


def model_rows(found: EnsembleScores) -> Iterator[ModelRow]:
    """Yield rows of the members, of each combination, and of the single model."""
    for member in found.members:
        yield ModelRow(_member_name(member), member.answered, member.epochs_before + member.epochs)
        if member.average is not None:
            yield ModelRow(
                f"{_member_name(member)}, running average", member.average, member.epochs_before + member.epochs
            )
    for one in found.combined:
        yield ModelRow(METHOD_TITLES[one.way], one.answered, found.epochs, chosen=one.way == found.combine)
    if (single := found.baseline) is not None:
        yield ModelRow(f"single model {single.name}", single.answered, single.epochs_before + single.epochs)


def ensemble_remarks(found: EnsembleScores) -> Iterator[str]:
    """Yield sentences that compare the rows."""
    yield (
        f"Epochs are those trained until then, what the members have in common once: {found.epochs:g} for all of them. "
        f"The figures of this report are of the {METHOD_TITLES[found.combine]}."
    )
    single = found.baseline
    if single is not None:
        own = single.epochs_before + single.epochs
        if abs(own - found.epochs) <= EPOCH_TOLERANCE * found.epochs:
            yield f"The single model {single.name} was trained as long ({own:g} epochs), in one go."
        else:
            yield (
                f"The single model {single.name} was trained for {own:g} epochs, the ensemble for {found.epochs:g}: "
                "the two do not compare at equal training."
            )
    cost = next((one.statistics_seconds for one in found.combined if one.statistics_seconds), None)
    if cost is not None:
        yield f"Batch norm's statistics of the mean weights took {cost:.2g} s over training images, once."


def ensemble_text_table(found: EnsembleScores) -> str:
    """Format the table as text for a terminal."""
    cells = [list(TABLE_COLUMNS), *(_cells(row) for row in model_rows(found))]
    widths = [max(len(line[i]) for line in cells) for i in range(len(TABLE_COLUMNS))]
    rules = [f"<{widths[0]}", *(f">{width}" for width in widths[1:])]
    return "\n".join("  ".join(f"{cell:{rule}}" for cell, rule in zip(line, rules, strict=True)) for line in cells)


def _cells(row: ModelRow) -> list[str]:
    low, high = row.answered.top1_interval
    return [
        row.name,
        markup.format_percent(row.answered.top1, 2),
        f"{100 * low:.1f} to {100 * high:.1f}",
        markup.format_percent(row.answered.top5, 2),
        markup.format_decimal(row.answered.loss, 4),
        f"{row.epochs:g}",
        str(row.answered.passes),
        markup.format_rate(row.answered.images_per_second),
    ]


def _member_name(member: SingleModel) -> str:
    """Return the member's run and the epoch of its snapshot."""
    if member.started_epoch is None:
        return member.name
    return f"{member.name}, from epoch {member.started_epoch:g} of {member.started_from}"


def _disagreement_table(found: EnsembleScores) -> Markup:
    names = [member.name for member in found.members]
    head = tag("tr", tag("th"), [tag("th", name, class_="n") for name in names])
    lines = [
        tag(
            "tr",
            tag("td", name),
            [
                tag("td", markup.MISSING_TEXT if i == j else markup.format_percent(share, 2), class_="n")
                for j, share in enumerate(shares)
            ],
        )
        for i, (name, shares) in enumerate(zip(names, found.disagreement, strict=True))
    ]
    caption = tag("figcaption", tag("b", "Disagreement"), ": share of images whose first guesses differ")
    return tag(
        "figure", caption, tag("table", tag("thead", head), tag("tbody", lines), class_="compact"), class_="panel"
    )
