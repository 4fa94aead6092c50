"""Standalone SVG files of charts, and dot charts.

A dot chart has one named row per group, with every value and the mean.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from statistics import fmean
from typing import Any

from podscale.report.charts.lines import (
    DEFAULT_X,
    DEFAULT_Y,
    HEIGHT,
    LEFT,
    RIGHT,
    WIDTH,
    LineSeries,
    ReferenceLine,
    Scale,
    XAxis,
    YAxis,
    horizontal_line,
    line_drawing,
    round_outwards,
    vertical_line,
)
from podscale.report.markup import Markup, chart_figure, format_short, join_markup, tag

ROW_HEIGHT, FOOT_HEIGHT = 34.0, 34.0
PLOT_LEFT = LEFT / 2
MARGIN_HEIGHT, TITLE_HEIGHT, LEGEND_HEIGHT, LETTER_WIDTH = 16.0, 40.0, 16.0, 5.9
"""Sizes in drawing units; LETTER_WIDTH is the average width of a letter."""
BACKGROUND_STYLE = (
    "svg{background:var(--bg);font-family:system-ui,sans-serif}text.title{font-weight:600;font-size:13px}"
    "svg text.readable{stroke:var(--bg)}"
)


@dataclass(frozen=True)
class DotRow:
    """Named row of a dot chart; `colour` is a number in the palette, from 1, `note` the text at the right end."""

    name: str
    values: Sequence[float]
    colour: int = 1
    note: str = ""


def dots_height(rows: Sequence[DotRow]) -> float:
    return ROW_HEIGHT * len(rows) + FOOT_HEIGHT


def dots_drawing(rows: Sequence[DotRow], x_range: tuple[float, float] | None = None) -> Markup:
    """Draw the rows, `WIDTH` by `dots_height`, with their means as bars and the first row's mean as a dashed line.

    The axis covers the values, widened to round numbers, but at most `x_range`.
    """
    values = [value for row in rows for value in row.values]
    low, high = round_outwards(min(values), max(values))
    if x_range is not None:
        low, high = max(low, x_range[0]), min(high, x_range[1])
    x = Scale(low, high, PLOT_LEFT, WIDTH - RIGHT)
    bottom = ROW_HEIGHT * len(rows)
    columns = [
        (
            vertical_line(x(v), 0.0, bottom, "grid"),
            tag("text", format_short(v), x=x(v), y=bottom + 16, text_anchor="middle"),
        )
        for v in x.ticks()
    ]
    level = vertical_line(x(fmean(rows[0].values)), 0.0, bottom, "level") if rows[0].values else None
    return join_markup(columns, level, [_draw_row(row, ROW_HEIGHT * number, x) for number, row in enumerate(rows)])


def dots_chart(
    title: str, rows: Sequence[DotRow], *, unit: str = "", x_range: tuple[float, float] | None = None
) -> Markup:
    """Draw a titled figure (see `dots_drawing`)."""
    caption = tag("span", unit, class_="unit") if unit else None
    return chart_figure(title, WIDTH, dots_height(rows), dots_drawing(rows, x_range), caption=caption)


def dots_chart_svg(
    title: str, rows: Sequence[DotRow], *, unit: str = "", x_range: tuple[float, float] | None = None
) -> str:
    """Return a titled dot chart as the text of an SVG file (see `dots_drawing`)."""
    top = TITLE_HEIGHT + (LEGEND_HEIGHT / 2 if unit else 0.0)
    label = _draw_unit(unit, TITLE_HEIGHT - 4)
    return _titled_svg(title, label, dots_drawing(rows, x_range), top=top, height=dots_height(rows))


def line_chart_svg(
    title: str,
    series: Sequence[LineSeries],
    *,
    x: XAxis = DEFAULT_X,
    y: YAxis = DEFAULT_Y,
    vlines: Sequence[ReferenceLine] = (),
) -> str:
    """Return a line chart with title and legend as the text of an SVG file."""
    legend, rows = _draw_legend(series)
    top = TITLE_HEIGHT + LEGEND_HEIGHT * rows + (LEGEND_HEIGHT if y.label else 0.0)
    head = [legend, _draw_unit(y.label, top - 4)]
    drawing = line_drawing(series, x=x, y=y, vlines=vlines)
    return _titled_svg(title, head, drawing, top=top, height=HEIGHT + MARGIN_HEIGHT / 2)


def standalone_svg(*drawing: Any, width: float, height: float, enlarged: float = 1.0) -> str:
    """Return the text of an SVG file; sizes are in drawing units, `enlarged` in pixels per unit."""
    style = (resources.files("podscale.report") / "style.css").read_text(encoding="utf-8")
    picture = tag(
        "svg",
        tag("style", Markup(style + BACKGROUND_STYLE)),
        drawing,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width:.0f} {height:.0f}",
        width=f"{enlarged * width:.0f}",
    )
    return f"{picture}\n"


def _draw_row(row: DotRow, top: float, x: Scale) -> list[Any]:
    y, style = top + 25.0, f"dot pale c{row.colour}"
    note = tag("text", row.note, x=WIDTH - RIGHT, y=top + 14, text_anchor="end", class_="readable")
    return [
        tag("text", row.name, x=PLOT_LEFT, y=top + 14, class_="readable"),
        note if row.note else None,
        horizontal_line(y, "grid", PLOT_LEFT),
        vertical_line(x(fmean(row.values)), y - 7, y + 7, f"line c{row.colour}") if row.values else None,
        *(
            tag("circle", tag("title", f"{row.name}: {format_short(v)}"), cx=x(v), cy=y, r=3.4, class_=style)
            for v in row.values
        ),
    ]


def _draw_unit(unit: str, y: float) -> Markup | None:
    return tag("text", unit, x=MARGIN_HEIGHT, y=y, class_="unit") if unit else None


def _draw_legend(series: Sequence[LineSeries]) -> tuple[list[Markup], int]:
    """Draw the names of the lines; return also the number of rows that they take."""
    keys, row, left = [], 0, MARGIN_HEIGHT
    for line in series:
        width = LETTER_WIDTH * len(line.name) + 42.0
        if left + width > WIDTH + MARGIN_HEIGHT and left > MARGIN_HEIGHT:
            row, left = row + 1, MARGIN_HEIGHT
        y, dashed = TITLE_HEIGHT + LEGEND_HEIGHT * row, " dashed" if line.dashed else ""
        keys.append(tag("line", x1=left, x2=left + 14, y1=y - 4, y2=y - 4, class_=f"line c{line.colour}{dashed}"))
        keys.append(tag("text", line.name, x=left + 19, y=y))
        left += width
    return keys, row + 1


def _titled_svg(title: str, head: Any, drawing: Markup, *, top: float, height: float) -> str:
    return standalone_svg(
        tag("text", title, x=MARGIN_HEIGHT, y=MARGIN_HEIGHT + 4, class_="title"),
        head,
        tag("g", drawing, transform=f"translate({MARGIN_HEIGHT:.0f} {top:.0f})"),
        width=WIDTH + 2 * MARGIN_HEIGHT,
        height=top + height,
        enlarged=1.6,
    )
