"""Bars: phases of the time, images per class, and the sorted counts of many classes."""

from collections.abc import Sequence
from typing import Any

from podscale.evaluate.report.charts.scale import Scale, round_outwards
from podscale.evaluate.report.figures import format_integer, format_percent, format_seconds, format_short
from podscale.evaluate.report.svg import Markup, tag

PALETTE_SIZE = 8
"""Colours c1 to c8 of style.css."""


def stacked_bar_chart(title: str, parts: Sequence[tuple[str, float]]) -> Markup:
    """One bar of seconds by name, with a table of shares under it: the eye compares, the table tells."""
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
    """Images per class, for few classes: one row a class, one bar a split."""
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
    """The counts of many classes from the largest to the smallest, as one step line over an area."""
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
    label = f"largest {format_integer(ordered[0])}, median {format_integer(ordered[len(ordered) // 2])}, smallest {format_integer(ordered[-1])}"
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
