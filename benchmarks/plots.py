"""Plots of results as SVG files that stand alone: no script, no fonts of their own, readable on light and dark pages.

Drawn with the scales and the markup of Podscale's reports; what differs is that a file has its own colours and ground.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from podscale.evaluate.report.charts.scale import Scale, rounded_out
from podscale.evaluate.report.figures import short
from podscale.evaluate.report.svg import Markup, tag

WIDTH, PLOT_HEIGHT = 640.0, 260.0
LEFT, RIGHT, TITLE, LEGEND_ROW, BOTTOM = 58.0, 16.0, 34.0, 20.0, 46.0
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#7a5195", "#e69f00", "#56b4e9", "#8a8f98", "#cc79a7")
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#5f6873}text.title{font-size:15px;font-weight:600;fill:#1d2126}"
    ".grid{stroke:#e6e8ea}.axis{stroke:#aab1b8}.line{fill:none;stroke-width:2;stroke-linejoin:round}.bar{stroke-width:1.5}"
)


@dataclass(frozen=True)
class Line:
    """A named line of (x, y, deviation): the deviation is drawn as a bar to both sides where it is not 0."""

    name: str
    points: Sequence[tuple[float, float, float]]


def write_plot(
    path: Path,
    title: str,
    lines: Sequence[Line],
    *,
    x_name: str,
    y_name: str,
    log_x: bool = False,
    x_ticks: Sequence[float] = (),
    y_range: tuple[float, float] | None = None,
) -> None:
    """Writes one plot. x_ticks: where the horizontal axis is marked; default: round numbers."""
    drawn = [line for line in lines if line.points]
    xs = [x for line in drawn for x, _, _ in line.points]
    ys = [y + side * d for line in drawn for _, y, d in line.points for side in (-1, 1)]
    room = 1.12 if log_x else 1.0
    legend, rows = _legend(drawn)
    top = TITLE + LEGEND_ROW * (rows + 1)
    base = top + PLOT_HEIGHT
    x = Scale(min(xs) / room if log_x else min(0.0, *xs), max(xs) * room, LEFT, WIDTH - RIGHT, log_x)
    y = Scale(*(y_range or rounded_out(min(ys), max(ys))), base, top)
    body = [
        tag("rect", width=WIDTH, height=base + BOTTOM, fill="#ffffff"),
        tag("text", title, x=8.0, y=22.0, class_="title"),
        legend,
        tag("text", y_name, x=8.0, y=top - 10),
        _frame(x, y, x_ticks or x.ticks(7), x_name),
        [_line(line, COLOURS[i % len(COLOURS)], x, y) for i, line in enumerate(drawn)],
    ]
    drawing = tag(
        "svg",
        tag("style", Markup(STYLE)),
        body,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {WIDTH:.0f} {base + BOTTOM:.0f}",
        role="img",
        aria_label=title,
    )
    path.write_text(f"{drawing}\n")


def _frame(x: Scale, y: Scale, x_ticks: Sequence[float], x_name: str) -> list[list[Markup]]:
    base = y.start
    rows = [
        [
            tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y(value), y2=y(value), class_="grid"),
            tag("text", short(value), x=LEFT - 8, y=y(value) + 4, text_anchor="end"),
        ]
        for value in y.ticks(6)
    ]
    columns = [
        [
            tag("line", x1=x(value), x2=x(value), y1=base, y2=base + 5, class_="axis"),
            tag("text", f"{value:,.6g}", x=x(value), y=base + 19, text_anchor="middle"),
        ]
        for value in x_ticks
    ]
    axis = tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=base, y2=base, class_="axis")
    return [*rows, *columns, [axis, tag("text", x_name, x=WIDTH - RIGHT, y=base + 38, text_anchor="end")]]


def _legend(lines: Sequence[Line]) -> tuple[list[Markup], int]:
    """The names of the lines under the title, and how many rows they take; a single line needs none."""
    if len(lines) < 2:
        return [], 0
    parts, at, row = [], 8.0, 1
    for i, line in enumerate(lines):
        width = 24 + 6.7 * len(line.name) + 18
        if at + width > WIDTH and at > 8.0:
            at, row = 8.0, row + 1
        y, colour = TITLE + LEGEND_ROW * row - 6, COLOURS[i % len(COLOURS)]
        parts.append(tag("line", x1=at, x2=at + 18, y1=y - 4, y2=y - 4, stroke=colour, stroke_width=3))
        parts.append(tag("text", line.name, x=at + 24, y=y))
        at += width
    return parts, row


def _line(line: Line, colour: str, x: Scale, y: Scale) -> list[Markup]:
    path = "".join(f"{'L' if i else 'M'}{x(a):.1f} {y(b):.1f}" for i, (a, b, _) in enumerate(line.points))
    bars = [
        tag("line", x1=x(a), x2=x(a), y1=y(b - d), y2=y(b + d), class_="bar", stroke=colour)
        for a, b, d in line.points
        if d
    ]
    dots = [tag("circle", cx=x(a), cy=y(b), r=3.2, fill=colour) for a, b, _ in line.points]
    return [tag("path", d=path, class_="line", stroke=colour), *bars, *dots]
