"""Bar charts, the confusion matrix as a heat map, and the reliability diagram."""

from collections.abc import Sequence
from typing import Any

from podscale.evaluation.evaluation_json import CalibrationFigures
from podscale.report.charts.lines import Scale, round_outwards
from podscale.report.markup import Markup, format_integer, format_percent, format_seconds, format_short, tag

PALETTE_SIZE = 8
"""Number of colours, c1 to c8 of style.css."""


def stacked_bar_chart(title: str, parts: Sequence[tuple[str, float]]) -> Markup:
    """Draw one bar of seconds by name, with a table of the same values under it."""
    total = sum(seconds for _, seconds in parts) or 1.0
    pieces, rows, at = [], [], 0.0
    for i, (name, seconds) in enumerate(parts):
        colour, width = i % PALETTE_SIZE + 1, seconds / total * 1000
        label = f"{name}: {format_seconds(seconds)}, {format_percent(seconds / total)}"
        pieces.append(
            tag(
                "rect", tag("title", label), x=at, y=0, width=max(width - 1.5, 0.5), height=34, class_=f"fill c{colour}"
            )
        )
        key = tag("td", tag("i", class_=f"key c{colour}"), name.replace("_", " "))
        rows.append(
            tag(
                "tr",
                key,
                tag("td", format_seconds(seconds), class_="n"),
                tag("td", format_percent(seconds / total), class_="n"),
            )
        )
        at += width
    picture = tag(
        "svg", pieces, viewBox="0 0 1000 34", preserveAspectRatio="none", role="img", aria_label=title, class_="stack"
    )
    return tag(
        "figure", tag("figcaption", tag("b", title)), picture, tag("table", rows, class_="compact"), class_="panel"
    )


def class_bar_chart(title: str, names: Sequence[str], groups: Sequence[tuple[str, Sequence[int]]]) -> Markup:
    """Draw images per class, for few classes: one row per class, one bar per split."""
    top = max((value for _, values in groups for value in values), default=0) or 1
    row, left, width = 14.0 * len(groups) + 10, 120.0, 440.0
    x = Scale(0, top, left, width - 52)
    drawn: list[Any] = []
    for i, name in enumerate(names):
        y = i * row + 4
        label = name if len(name) <= 13 else name[:12] + "\u2026"
        middle = y + 7.0 * len(groups) + 4
        drawn.append(tag("text", tag("title", name), label, x=left - 8, y=middle, text_anchor="end"))
        for j, (group, values) in enumerate(groups):
            bar = y + j * 14
            drawn += [
                tag(
                    "rect",
                    tag("title", f"{name}, {group}: {format_integer(values[i])} images"),
                    x=left,
                    y=bar,
                    width=max(x(values[i]) - left, 0.5),
                    height=12.0,
                    class_=f"fill c{j + 1}",
                ),
                tag("text", format_integer(values[i]), x=x(values[i]) + 5, y=bar + 10),
            ]
    legend = [tag("span", tag("i", class_=f"key c{j + 1}"), group) for j, (group, _) in enumerate(groups)]
    view = f"0 0 {width:.0f} {len(names) * row:.0f}"
    return tag(
        "figure",
        tag("figcaption", tag("b", title), tag("span", legend, class_="legend")),
        tag("svg", drawn, viewBox=view, role="img", aria_label=title, class_="chart"),
        class_="panel",
    )


def ranked_count_chart(title: str, counts: Sequence[int], unit: str) -> Markup:
    """Draw the counts of many classes in falling order, as a step line over an area."""
    ordered = sorted(counts, reverse=True)
    width, height, left, bottom = 440.0, 200.0, 50.0, 36.0
    _, high = round_outwards(0.0, float(max(ordered[0], 1)))
    x, y = Scale(0, len(ordered), left, width - 12), Scale(0, high, height - bottom, 10)
    stride = max(1, len(ordered) // 400)
    steps = "".join(
        f"L{x(i):.1f} {y(ordered[i]):.1f}L{x(min(i + stride, len(ordered))):.1f} {y(ordered[i]):.1f}"
        for i in range(0, len(ordered), stride)
    )
    base = height - bottom
    area = f"M{left:.1f} {base:.1f}{steps}L{x(len(ordered)):.1f} {base:.1f}Z"
    largest, median, smallest = (format_integer(ordered[i]) for i in (0, len(ordered) // 2, -1))
    label = f"largest {largest}, median {median}, smallest {smallest}"
    axis = [
        (
            tag("line", x1=left, x2=width - 12, y1=y(v), y2=y(v), class_="grid"),
            tag("text", format_short(v), x=left - 7, y=y(v) + 4, text_anchor="end"),
        )
        for v in y.ticks(4)
    ]
    names = tag("text", "classes, by number of images", x=width - 12, y=height - 8, text_anchor="end", class_="unit")
    marks = [tag("text", format_short(v), x=x(v), y=base + 16, text_anchor="middle") for v in x.ticks(5)]
    return tag(
        "figure",
        tag("figcaption", tag("b", title), tag("span", f"{unit}; {label}", class_="unit")),
        tag(
            "svg",
            axis,
            tag("path", tag("title", label), d=area, class_="area c1"),
            marks,
            names,
            viewBox=f"0 0 {width:.0f} {height:.0f}",
            role="img",
            aria_label=title,
            class_="chart",
        ),
        class_="panel",
    )


MAX_NAME_LENGTH = 13
"""Characters of a class name in the drawing; the full name shows on hover."""


def heatmap(title: str, names: Sequence[str], matrix: Sequence[Sequence[int]]) -> Markup:
    """Draw a confusion matrix: rows are true classes, columns predictions.

    The shade is the square root of the fraction of the row, so that rare classes and one mistake in a hundred are
    visible. The diagonal and the mistakes have different colours.
    """
    n = len(names)
    cell = max(16.0, min(34.0, 320.0 / n))
    longest = min(MAX_NAME_LENGTH, max(len(name) for name in names))
    left, top = 14.0 + 8.0 * longest, 16.0 + 5.0 * longest
    parts = []
    for i, row in enumerate(matrix):
        total = sum(row) or 1
        parts.append(_draw_name(names[i], left - 8, top + (i + 0.5) * cell + 4, slanted=False))
        parts.append(_draw_name(names[i], left + (i + 0.5) * cell + 2, top - 8, slanted=True))
        for j, value in enumerate(row):
            shade = (value / total) ** 0.5 if value else 0.0
            tint = "right" if i == j else "wrong"
            label = f"{names[i]} taken for {names[j]}: {value} of {sum(row)}"
            parts.append(
                tag(
                    "g",
                    tag("title", label),
                    tag("rect", x=left + j * cell, y=top + i * cell, width=cell - 1, height=cell - 1, class_="cell"),
                    tag(
                        "rect",
                        x=left + j * cell,
                        y=top + i * cell,
                        width=cell - 1,
                        height=cell - 1,
                        class_=tint,
                        fill_opacity=shade,
                    )
                    if value
                    else None,
                    tag(
                        "text",
                        str(value),
                        x=left + (j + 0.5) * cell - 0.5,
                        y=top + (i + 0.5) * cell + 3.5,
                        text_anchor="middle",
                        class_="on" if shade > 0.6 else "off",
                        style=f"font-size:{min(12.0, cell * 0.9 / max(2, len(str(value)))):.1f}px",
                    )
                    if value
                    else None,
                )
            )
    side = n * cell
    width, height = left + side + 3.6 * longest, top + side + 4
    drawn = tag("svg", parts, viewBox=f"0 0 {width:.0f} {height:.0f}", role="img", aria_label=title, class_="chart")
    caption = tag("figcaption", tag("b", title), tag("span", "rows: true class, columns: prediction", class_="unit"))
    return tag("figure", caption, drawn, class_="panel")


def _draw_name(name: str, x: float, y: float, *, slanted: bool) -> Markup:
    label = name if len(name) <= MAX_NAME_LENGTH else name[: MAX_NAME_LENGTH - 1] + "\u2026"
    if slanted:
        return tag("text", tag("title", name), label, x=x, y=y, transform=f"rotate(-50 {x:.1f} {y:.1f})")
    return tag("text", tag("title", name), label, x=x, y=y, text_anchor="end")


RELIABILITY_WIDTH, RELIABILITY_LEFT, RELIABILITY_RIGHT = 440.0, 50.0, 12.0


def reliability_diagram(title: str, figures: CalibrationFigures) -> Markup:
    """Draw the accuracy of each confidence bin against the diagonal of perfect calibration.

    See Guo et al. 2017, figure 1. The number of samples of each bin is drawn below.
    """
    x = Scale(0, 1, RELIABILITY_LEFT, RELIABILITY_WIDTH - RELIABILITY_RIGHT)
    y = Scale(0, 1, 220, 12)
    most = max(figures.count) or 1
    below = Scale(0, most, 302, 246)
    bars, mass = [], []
    for i, number in enumerate(figures.count):
        low, high = figures.edges[i], figures.edges[i + 1]
        accuracy, confidence = figures.accuracy[i], figures.confidence[i]
        label = f"confidence {format_percent(low, 0)} to {format_percent(high, 0)}: {format_integer(number)} samples"
        if accuracy is not None and confidence is not None:
            full = f"{label}, {format_percent(accuracy)} right at a mean confidence of {format_percent(confidence)}"
            bars.append(_draw_bar(full, x(low), x(high), y(accuracy), 220, "fill c1 tint"))
            bars.append(tag("circle", cx=x(confidence), cy=y(accuracy), r=2.6, class_="dot c1 ring"))
        mass.append(_draw_bar(label, x(low), x(high), below(number), 302, "fill quiet"))
    grid = [
        (
            tag("line", x1=RELIABILITY_LEFT, x2=RELIABILITY_WIDTH - RELIABILITY_RIGHT, y1=y(v), y2=y(v), class_="grid"),
            tag("text", format_percent(v, 0), x=RELIABILITY_LEFT - 7, y=y(v) + 4, text_anchor="end"),
            tag("text", format_percent(v, 0), x=x(v), y=320, text_anchor="end" if v == 1 else "middle"),
        )
        for v in (0.0, 0.25, 0.5, 0.75, 1.0)
    ]
    diagonal = tag("line", x1=x(0), y1=y(0), x2=x(1), y2=y(1), class_="level strong")
    names = [
        tag("text", "accuracy", x=RELIABILITY_LEFT + 6, y=22, class_="unit"),
        tag("text", "samples", x=RELIABILITY_LEFT + 6, y=252, class_="unit"),
        tag("text", "confidence", x=RELIABILITY_WIDTH - RELIABILITY_RIGHT, y=336, text_anchor="end", class_="unit"),
    ]
    base = [
        tag("line", x1=RELIABILITY_LEFT, x2=RELIABILITY_WIDTH - RELIABILITY_RIGHT, y1=h, y2=h, class_="axis")
        for h in (220, 302)
    ]
    return tag(
        "figure",
        tag("figcaption", tag("b", title), tag("span", "dashed: perfectly calibrated", class_="unit")),
        tag(
            "svg",
            grid,
            bars,
            diagonal,
            mass,
            base,
            names,
            viewBox=f"0 0 {RELIABILITY_WIDTH:.0f} 342",
            role="img",
            aria_label=title,
            class_="chart",
        ),
        class_="panel",
    )


def _draw_bar(label: str, left: float, right: float, top: float, base: float, style: str) -> Markup:
    height = max(base - top, 0.0)
    return tag("rect", tag("title", label), x=left + 0.75, y=top, width=right - left - 1.5, height=height, class_=style)
