"""Page of a prediction in the style of report.html: counts, classes, pictures with their classes, and failures."""

import io
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from PIL import Image

from podscale.errors import InputError
from podscale.prediction.image_inputs import Failure
from podscale.prediction.preparation import ChunkDecoder
from podscale.prediction.summary import MAX_PICTURES, PredictionSummary, ShownImage
from podscale.report import markup
from podscale.report.markup import Markup, headline_tile, note, panel, section_tag, table, table_row, tag
from podscale.report.page import render_framed_page
from podscale.report.sections.dataset import image_tag
from podscale.util.files import write_atomically
from podscale.util.formatting import printable

MAX_CLASSES = 20
"""Classes that the page counts, most frequent first."""


def write_contact_sheet(summary: PredictionSummary, path: Path) -> None:
    """Write the page; its pictures are read again, so that none are kept while the list is predicted."""
    model = summary.predictor.model.files.name
    with closing(summary.predictor.open_decoder()) as decoder:
        body = [_header(summary, model), _classes(summary), *_pictures(summary, decoder), _failures(summary)]
    page = render_framed_page(
        f"{model}: Podscale predictions", body, f"Predictions of {summary.predictor.model.files.directory}."
    )
    try:
        write_atomically(path, page)
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror}", field="--html", got=str(path)) from error


def _header(summary: PredictionSummary, model: str) -> Markup:
    seconds = summary.seconds
    tiles = [
        headline_tile("images", markup.format_integer(summary.images), f"in {markup.format_seconds(seconds)}"),
        headline_tile("without a prediction", markup.format_integer(summary.failures), _most_frequent_reason(summary)),
        headline_tile("images/s", markup.format_rate(summary.images / seconds), "reading and start included"),
        headline_tile(
            "top-1",
            markup.format_percent(summary.accuracy, 2),
            f"of {markup.format_integer(summary.labelled)} labelled images" if summary.labelled else "no labels known",
        ),
    ]
    return tag(
        "header",
        tag("p", "Podscale predictions", class_="kicker"),
        tag("h1", model),
        tag("p", f"Probabilities: {summary.calibration}.", class_="subtitle"),
        tag("div", tiles, class_="tiles"),
    )


def _most_frequent_reason(summary: PredictionSummary) -> str:
    if not summary.failures:
        return "every image has one"
    reason, count = summary.reasons.most_common(1)[0]
    return f"{reason}: {markup.format_integer(count)}"


def _classes(summary: PredictionSummary) -> Markup | None:
    total = summary.classes.total()
    if not total:
        return None
    head = tag("tr", tag("th", "class"), tag("th", "images", class_="n", colspan=2), tag("th", "share", class_="n"))
    rows = [
        tag(
            "tr",
            tag("td", name),
            tag("td", tag("span", tag("i", style=f"width:{100 * count / total:.1f}%"), class_="meter")),
            tag("td", markup.format_integer(count), class_="n"),
            tag("td", markup.format_percent(count / total), class_="n"),
        )
        for name, count in summary.classes.most_common(MAX_CLASSES)
    ]
    more = len(summary.classes) - MAX_CLASSES
    rest = note(f"{more} more classes have fewer images.") if more > 0 else None
    return section_tag("Predicted classes", panel("Most probable class of each image", table(head, rows), rest))


def _pictures(summary: PredictionSummary, decoder: ChunkDecoder) -> list[Markup]:
    legend = "The square that the model sees, its most probable class and the probability, the next class, the file."
    sections = []
    if summary.doubtful:
        sections.append(_picture_section("Least certain", legend, summary.doubtful, decoder))
    if summary.sample:
        images = sorted(summary.sample, key=lambda image: image.number)
        shown = summary.images - summary.failures
        title = "All images" if shown <= MAX_PICTURES else "Random sample"
        sections.append(_picture_section(title, legend, images, decoder))
    return sections


def _picture_section(title: str, legend: str, images: Sequence[ShownImage], decoder: ChunkDecoder) -> Markup:
    return section_tag(title, note(legend), tag("div", [_card(image, decoder) for image in images], class_="cards"))


def _card(image: ShownImage, decoder: ChunkDecoder) -> Markup:
    prediction = image.prediction
    wrong = prediction.label is not None and prediction.label != prediction.classes[0]
    caption = tag(
        "figcaption",
        tag("b", prediction.classes[0], class_="wrongname" if wrong else None),
        tag("span", markup.format_percent(prediction.probabilities[0]), class_="n"),
        tag("span", "is ", tag("b", prediction.label), class_="true") if wrong else None,
        [
            part
            for name, value in zip(prediction.classes[1:2], prediction.probabilities[1:2], strict=True)
            for part in (tag("span", name, class_="label"), tag("span", markup.format_percent(value), class_="n label"))
        ],
        tag("span", _file_name(prediction.image), class_="path", title=prediction.image),
    )
    return tag("figure", _picture(image, decoder), caption, class_="card")


def _picture(image: ShownImage, decoder: ChunkDecoder) -> Markup:
    pixels = decoder.prepare(image.item)
    if isinstance(pixels, Failure):  # it was readable before
        return tag("span", f"cannot be read again: {pixels.detail}", class_="noimage")
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return image_tag(out.getvalue(), f"{_file_name(image.prediction.image)}: {image.prediction.classes[0]}")


def _file_name(image: str) -> str:
    return printable(image.rpartition("/")[2] or image)


def _failures(summary: PredictionSummary) -> Markup | None:
    if not summary.failures:
        return None
    rows = [
        table_row(one.image, one.failure.reason, one.failure.detail, text_columns=3)
        for one in summary.failed
        if one.failure is not None
    ]
    more = summary.failures - len(summary.failed)
    rest = note(f"{markup.format_integer(more)} more are in the rows.") if more else None
    head = table_row("image", "reason", "detail", cell="th", text_columns=3)
    return section_tag("Without a prediction", tag("div", table(head, rows), class_="scroll"), rest)
