"""Ensemble section: members, their disagreement, and accuracy and cost of each combination."""

from collections.abc import Iterator
from typing import NamedTuple

from podscale.evaluation.ensemble_scores import EnsembleScores, ScoreSummary, SingleModel
from podscale.report import markup
from podscale.report.markup import Markup, note, panel, section_tag, table, table_row
from podscale.report.report_data import ReportData

METHOD_TITLES = {
    "probabilities": "mean of probabilities",
    "logits": "mean of logits",
    "weights": "mean of weights, one model",
}
TABLE_COLUMNS = ("", "top-1", "95 % interval", "top-5", "loss", "epochs", "passes", "images/s")
EPOCH_TOLERANCE = 0.01
"""Largest relative difference between the epochs of trainings that count as equally long."""


class ModelRow(NamedTuple):
    """Row of the table; `epochs` counts all training that the row's models had."""

    name: str
    answered: ScoreSummary
    epochs: float
    chosen: bool = False


def ensemble_section(data: ReportData) -> Markup | None:
    """Render the table of models and the table of disagreements."""
    scores = data.evaluation.ensemble if data.evaluation else None
    if scores is None:
        return None
    rows = [table_row(*_cells(row), class_="chosen" if row.chosen else None) for row in model_rows(scores)]
    remarks = [note(sentence) for sentence in ensemble_remarks(scores)]
    models = table(table_row(*TABLE_COLUMNS, cell="th"), rows, class_=None)
    return section_tag("Ensemble", models, *remarks, _disagreement_table(scores))


def model_rows(scores: EnsembleScores) -> Iterator[ModelRow]:
    """Yield the members, the combinations, and the single model."""
    for member in scores.members:
        name, epochs = _member_name(member), member.epochs_before + member.epochs
        yield ModelRow(name, member.answered, epochs)
        if member.average is not None:
            yield ModelRow(f"{name}, running average", member.average, epochs)
    for method in scores.combined:
        yield ModelRow(METHOD_TITLES[method.way], method.answered, scores.epochs, chosen=method.way == scores.combine)
    if (single := scores.baseline) is not None:
        yield ModelRow(f"single model {single.name}", single.answered, single.epochs_before + single.epochs)


def ensemble_remarks(scores: EnsembleScores) -> Iterator[str]:
    """Yield sentences that compare the models."""
    yield (
        f"Epochs include those of earlier runs; epochs that members share count once, which is {scores.epochs:g} for "
        f"all members. The scores of this report are those of the {METHOD_TITLES[scores.combine]}."
    )
    if (single := scores.baseline) is not None:
        epochs = single.epochs_before + single.epochs
        if abs(epochs - scores.epochs) <= EPOCH_TOLERANCE * scores.epochs:
            yield f"The single model {single.name} was trained for as many epochs ({epochs:g}), in one run."
        else:
            yield (
                f"The single model {single.name} was trained for {epochs:g} epochs, the ensemble for "
                f"{scores.epochs:g}: this is no comparison at equal training."
            )
    cost = next((method.statistics_seconds for method in scores.combined if method.statistics_seconds), None)
    if cost is not None:
        yield f"Batch norm's statistics of the mean weights were computed once from training images, in {cost:.2g} s."


def ensemble_text_table(scores: EnsembleScores) -> str:
    """Format the table of models for a terminal."""
    rows = [list(TABLE_COLUMNS), *(_cells(row) for row in model_rows(scores))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    formats = [f"<{widths[0]}", *(f">{width}" for width in widths[1:])]
    return "\n".join("  ".join(f"{cell:{form}}" for cell, form in zip(row, formats, strict=True)) for row in rows)


def _cells(row: ModelRow) -> list[str]:
    low, high = row.answered.top1_interval
    return [
        row.name,
        markup.format_percent(row.answered.top1, 2),
        f"{100 * low:.1f} to {100 * high:.1f}",
        markup.format_percent(row.answered.top5, 2),
        markup.format_loss(row.answered.loss),
        f"{row.epochs:g}",
        str(row.answered.passes),
        markup.format_rate(row.answered.images_per_second),
    ]


def _member_name(member: SingleModel) -> str:
    """Return the member's run and the epoch of its snapshot."""
    if member.started_epoch is None:
        return member.name
    return f"{member.name}, from epoch {member.started_epoch:g} of {member.started_from}"


def _disagreement_table(scores: EnsembleScores) -> Markup:
    names = [member.name for member in scores.members]
    rows = [
        table_row(name, *(markup.MISSING_TEXT if i == j else markup.format_percent(v, 2) for j, v in enumerate(row)))
        for i, (name, row) in enumerate(zip(names, scores.disagreement, strict=True))
    ]
    head, caption = table_row("", *names, cell="th"), ": fraction of images whose top-1 classes differ"
    return panel("Disagreement", table(head, rows), caption=caption)
