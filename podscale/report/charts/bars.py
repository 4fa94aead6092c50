"""Bar charts, the confusion matrix as a heat map, and the reliability diagram."""

from collections.abc import Sequence
from typing import Any

from podscale.evaluation.evaluation_json import CalibrationBins
from podscale.report.charts.lines import LEFT, RIGHT, WIDTH, Scale, horizontal_line, round_outwards
from podscale.report.markup import (
    Markup,
    chart_figure,
    format_integer,
    format_percent,
    format_seconds,
    format_short,
    join_markup,
    panel,
    table_row,
    tag,
)

PALETTE_SIZE = 8
"""Colours c1 to c8 of style.css."""
MAX_NAME_LENGTH = 13
"""Characters of a drawn class name; the full name shows on hover."""


def stacked_bar_chart(title: str, parts: Sequence[tuple[str, float]]) -> Markup:
    """Draw one bar of seconds by name, above a table of the values."""
    total = sum(seconds for _, seconds in parts) or 1.0
    bars, rows, x = [], [], 0.0
    for i, (name, seconds) in enumerate(parts):
        colour, width = i % PALETTE_SIZE + 1, seconds / total * 1000
        time, share = format_seconds(seconds), format_percent(seconds / total)
        hover, style = tag("title", f"{name}: {time}, {share}"), f"fill c{colour}"
        bars.append(tag("rect", hover, x=x, y=0, width=max(width - 1.5, 0.5), height=34, class_=style))
        rows.append(table_row(join_markup(tag("i", class_=f"key c{colour}"), name.replace("_", " ")), time, share))
        x += width
    bar = tag(
        "svg", bars, viewBox="0 0 1000 34", preserveAspectRatio="none", role="img", aria_label=title, class_="stack"
    )
    return panel(title, bar, tag("table", rows, class_="compact"))


def class_bar_chart(title: str, names: Sequence[str], groups: Sequence[tuple[str, Sequence[int]]]) -> Markup:
    """Draw images per class, for few classes: one row per class, one bar per split."""
    top = max((value for _, values in groups for value in values), default=0) or 1
    row_height, left = 14.0 * len(groups) + 10, 120.0
    x = Scale(0, top, left, WIDTH - 52)
    drawn: list[Any] = []
    for i, name in enumerate(names):
        y = i * row_height + 4
        drawn.append(_draw_name(name, left - 8, y + 7.0 * len(groups) + 4))
        for j, (group, values) in enumerate(groups):
            count = format_integer(values[i])
            hover, width = tag("title", f"{name}, {group}: {count} images"), max(x(values[i]) - left, 0.5)
            drawn += [
                tag("rect", hover, x=left, y=y + j * 14, width=width, height=12.0, class_=f"fill c{j + 1}"),
                tag("text", count, x=x(values[i]) + 5, y=y + j * 14 + 10),
            ]
    legend = [tag("span", tag("i", class_=f"key c{j + 1}"), group) for j, (group, _) in enumerate(groups)]
    return chart_figure(title, WIDTH, len(names) * row_height, drawn, caption=tag("span", legend, class_="legend"))


def ranked_count_chart(title: str, counts: Sequence[int], unit: str) -> Markup:
    """Draw the counts of many classes in descending order, as a step line over an area."""
    ordered = sorted(counts, reverse=True)
    height, base = 200.0, 164.0
    _, high = round_outwards(0.0, float(max(ordered[0], 1)))
    x, y = Scale(0, len(ordered), LEFT, WIDTH - RIGHT), Scale(0, high, base, 10)
    stride = max(1, len(ordered) // 400)
    steps = "".join(
        f"L{x(i):.1f} {y(ordered[i]):.1f}L{x(min(i + stride, len(ordered))):.1f} {y(ordered[i]):.1f}"
        for i in range(0, len(ordered), stride)
    )
    area = f"M{LEFT:.1f} {base:.1f}{steps}L{x(len(ordered)):.1f} {base:.1f}Z"
    largest, median, smallest = (format_integer(ordered[i]) for i in (0, len(ordered) // 2, -1))
    label = f"largest {largest}, median {median}, smallest {smallest}"
    rows = [
        (horizontal_line(y(v), "grid"), tag("text", format_short(v), x=LEFT - 7, y=y(v) + 4, text_anchor="end"))
        for v in y.ticks(4)
    ]
    columns = [tag("text", format_short(v), x=x(v), y=base + 16, text_anchor="middle") for v in x.ticks(5)]
    axis = _draw_unit("classes, by number of images", WIDTH - RIGHT, height - 8, text_anchor="end")
    drawn = [rows, tag("path", tag("title", label), d=area, class_="area c1"), columns, axis]
    return chart_figure(title, WIDTH, height, drawn, caption=tag("span", f"{unit}; {label}", class_="unit"))


def heatmap(title: str, names: Sequence[str], matrix: Sequence[Sequence[int]]) -> Markup:
    """Draw a confusion matrix: rows are true classes, columns predictions.

    The shade is the square root of the row's fraction, so that rare mistakes are visible.
    """
    side = max(16.0, min(34.0, 320.0 / len(names)))
    longest = min(MAX_NAME_LENGTH, max(len(name) for name in names))
    left, top = 14.0 + 8.0 * longest, 16.0 + 5.0 * longest
    drawn = []
    for i, counts in enumerate(matrix):
        drawn.append(_draw_name(names[i], left - 8, top + (i + 0.5) * side + 4))
        drawn.append(_draw_name(names[i], left + (i + 0.5) * side + 2, top - 8, slanted=True))
        for j, count in enumerate(counts):
            hover = tag("title", f"{names[i]} predicted as {names[j]}: {count} of {sum(counts)}")
            share = count / (sum(counts) or 1)
            style = "right" if i == j else "wrong"
            drawn.append(tag("g", hover, _draw_cell(left + j * side, top + i * side, side, count, share, style)))
    width, height = left + len(names) * side + 3.6 * longest, top + len(names) * side + 4
    caption = tag("span", "rows: true class, columns: prediction", class_="unit")
    return chart_figure(title, width, height, drawn, caption=caption)


def reliability_diagram(title: str, bins: CalibrationBins) -> Markup:
    """Draw accuracy by confidence bin (Guo et al. 2017, figure 1), above the number of samples of each bin."""
    accuracy_base, count_base = 220, 302
    x, y = Scale(0, 1, LEFT, WIDTH - RIGHT), Scale(0, 1, accuracy_base, 12)
    count_y = Scale(0, max(bins.count) or 1, count_base, 246)
    bars, count_bars = [], []
    for i, count in enumerate(bins.count):
        low, high = bins.edges[i], bins.edges[i + 1]
        accuracy, confidence = bins.accuracy[i], bins.confidence[i]
        label = f"confidence {format_percent(low, 0)} to {format_percent(high, 0)}: {format_integer(count)} samples"
        if accuracy is not None and confidence is not None:
            full = f"{label}, accuracy {format_percent(accuracy)}, mean confidence {format_percent(confidence)}"
            bars.append(_draw_bar(full, (x(low), x(high)), y(accuracy), accuracy_base, "fill c1 tint"))
            bars.append(tag("circle", cx=x(confidence), cy=y(accuracy), r=2.6, class_="dot c1 ring"))
        count_bars.append(_draw_bar(label, (x(low), x(high)), count_y(count), count_base, "fill quiet"))
    grid = [
        (
            horizontal_line(y(v), "grid"),
            tag("text", format_percent(v, 0), x=LEFT - 7, y=y(v) + 4, text_anchor="end"),
            tag("text", format_percent(v, 0), x=x(v), y=320, text_anchor="end" if v == 1 else "middle"),
        )
        for v in (0.0, 0.25, 0.5, 0.75, 1.0)
    ]
    diagonal = tag("line", x1=x(0), y1=y(0), x2=x(1), y2=y(1), class_="level strong")
    axes = [horizontal_line(base, "axis") for base in (accuracy_base, count_base)]
    labels = [
        _draw_unit("accuracy", LEFT + 6, 22),
        _draw_unit("samples", LEFT + 6, 252),
        _draw_unit("confidence", WIDTH - RIGHT, 336, text_anchor="end"),
    ]
    drawn = [grid, bars, diagonal, count_bars, axes, labels]
    return chart_figure(title, WIDTH, 342, drawn, caption=tag("span", "dashed: perfectly calibrated", class_="unit"))


def _draw_name(name: str, x: float, y: float, *, slanted: bool = False) -> Markup:
    label = name if len(name) <= MAX_NAME_LENGTH else name[: MAX_NAME_LENGTH - 1] + "\u2026"
    if slanted:
        return tag("text", tag("title", name), label, x=x, y=y, transform=f"rotate(-50 {x:.1f} {y:.1f})")
    return tag("text", tag("title", name), label, x=x, y=y, text_anchor="end")


def _draw_unit(text: str, x: float, y: float, text_anchor: str | None = None) -> Markup:
    return tag("text", text, x=x, y=y, text_anchor=text_anchor, class_="unit")


def _draw_cell(x: float, y: float, side: float, count: int, share: float, style: str) -> list[Markup]:
    """Draw a cell of the heat map; it shows its count unless that is 0."""
    square = {"x": x, "y": y, "width": side - 1, "height": side - 1}
    background = tag("rect", **square, class_="cell")
    if not count:
        return [background]
    number = tag(
        "text",
        str(count),
        x=x + side / 2 - 0.5,
        y=y + side / 2 + 3.5,
        text_anchor="middle",
        class_="on" if share**0.5 > 0.6 else "off",
        style=f"font-size:{min(12.0, side * 0.9 / max(2, len(str(count)))):.1f}px",
    )
    return [background, tag("rect", **square, class_=style, fill_opacity=share**0.5), number]


def _draw_bar(label: str, x: tuple[float, float], top: float, base: float, style: str) -> Markup:
    left, right = x
    height = max(base - top, 0.0)
    return tag("rect", tag("title", label), x=left + 0.75, y=top, width=right - left - 1.5, height=height, class_=style)
