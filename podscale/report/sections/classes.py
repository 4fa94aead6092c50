"""Per-class results: confusion, calibration and the most confident mistakes."""

from podscale.evaluation.evaluation_json import ClassScores, Evaluation
from podscale.evaluation.scores import most_confident_mistakes
from podscale.report import markup
from podscale.report.charts.bars import heatmap, reliability_diagram
from podscale.report.markup import Markup, fact_table, note, panel, section_tag, table, table_row, tag
from podscale.report.report_data import ReportData
from podscale.report.sections.dataset import picture_tag
from podscale.util.formatting import printable

MAX_MISTAKES = 18
LISTED_PAIRS = 15


def confusion(data: ReportData) -> Markup | None:
    """Render the confusion matrix and the accuracy of each class."""
    evaluation = data.evaluation
    if evaluation is None:
        return None
    names = [entry.name for entry in evaluation.per_class]
    if evaluation.confusion_matrix is not None:
        panels = [
            heatmap("Confusion matrix", names, evaluation.confusion_matrix),
            _class_table("Classes, worst first", _by_accuracy(evaluation.per_class)),
        ]
    else:
        ranked = _by_accuracy(evaluation.per_class)
        panels = [_class_table("Worst classes", ranked[:12]), _class_table("Best classes", ranked[::-1][:12])]
        if evaluation.confused:
            panels.insert(0, _pairs_table(evaluation, names))
    return section_tag("Classes", tag("div", panels, class_="grid2"))


def calibration(data: ReportData) -> Markup | None:
    evaluation = data.evaluation
    if evaluation is None:
        return None
    facts = {
        "expected calibration error": markup.format_percent(evaluation.scores.ece, 2),
        "mean loss": f"{markup.format_loss(evaluation.scores.loss)} nats",
        "balanced accuracy": markup.format_percent(evaluation.scores.balanced_accuracy, 2),
        "images": markup.format_integer(evaluation.scores.samples),
        "evaluation speed": f"{markup.format_rate(evaluation.throughput.evaluation_images_per_second)} images/s",
    }
    bins = evaluation.calibration
    binning = note(
        f"{len(bins.count)} bins of equal width over the confidence of the predicted class, open below "
        f"and closed above. Source: {bins.source}."
    )
    diagram = reliability_diagram("Reliability", bins)
    return section_tag("Calibration", tag("div", diagram, panel("Scores", fact_table(facts), binning), class_="grid2"))


def mistakes(data: ReportData) -> Markup | None:
    """Render the most confident mistakes with their images."""
    if data.predictions is None or data.shards is None or data.evaluation is None:
        return None
    split = data.shards.split(data.evaluation.identity.split)
    rows = most_confident_mistakes(data.predictions, MAX_MISTAKES)
    if not len(rows):
        return section_tag("Most confident mistakes", tag("p", "None: every held-out image was classified correctly."))
    sample_of_key = {int(key): sample for sample, key in enumerate(split.keys)}
    cards = []
    for row in rows:
        key = int(data.predictions.keys[row])
        sample = sample_of_key.get(key)
        true, predicted = (data.classes[int(i)] for i in (data.predictions.labels[row], data.predictions.topk[row, 0]))
        source, picture = "not in the shard set", tag("span", class_="noimage")
        if sample is not None:
            source = printable(split.source(sample))
            picture = picture_tag(split, sample, f"{true}, predicted as {predicted}")
        caption = tag(
            "figcaption",
            tag("b", predicted, class_="wrongname"),
            tag("span", markup.format_percent(float(data.predictions.confidences[row, 0])), class_="n"),
            tag("span", "is ", tag("b", true), class_="true"),
            tag("span", source, class_="path", title=source),
            tag("code", f"{key:016x}"),
        )
        cards.append(tag("figure", picture, caption, class_="card"))
    legend = note("Predicted class and confidence, then the true class, the source and the sample key.")
    return section_tag("Most confident mistakes", legend, tag("div", cards, class_="cards"))


def _by_accuracy(classes: list[ClassScores]) -> list[ClassScores]:
    """Return the classes with samples, worst first, ties by index."""
    return sorted((entry for entry in classes if entry.accuracy is not None), key=lambda entry: entry.accuracy or 0.0)


def _class_table(title: str, entries: list[ClassScores]) -> Markup:
    head = tag(
        "tr",
        tag("th", "class"),
        tag("th", "accuracy", class_="n", colspan=2),
        tag("th", "precision", class_="n"),
        tag("th", "images", class_="n"),
    )
    rows = [
        tag(
            "tr",
            tag("td", entry.name, class_="clip", title=entry.name),
            tag("td", tag("span", tag("i", style=f"width:{100 * (entry.accuracy or 0):.1f}%"), class_="meter")),
            tag("td", markup.format_percent(entry.accuracy), class_="n"),
            tag("td", markup.format_percent(entry.precision), class_="n"),
            tag("td", markup.format_integer(entry.samples), class_="n"),
        )
        for entry in entries
    ]
    return panel(title, table(head, rows))


def _pairs_table(evaluation: Evaluation, names: list[str]) -> Markup:
    rows = []
    for pair in evaluation.confused[:LISTED_PAIRS]:
        share = markup.format_percent(pair.count / evaluation.per_class[pair.label].samples)
        rows.append(table_row(names[pair.label], names[pair.predicted], str(pair.count), share, text_columns=2))
    head = table_row("true class", "predicted as", "images", "of the class", cell="th", text_columns=2)
    return panel("Most confused pairs", table(head, rows))
