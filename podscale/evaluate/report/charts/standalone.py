"""Drawings as files of their own, in the colours of the report, on light and dark pages."""

from collections.abc import Sequence
from importlib import resources
from typing import Any

from podscale.evaluate.report.charts.dots import DotRow, dots_drawing, dots_height
from podscale.evaluate.report.charts.lines import HEIGHT, WIDTH, LineSeries, line_drawing
from podscale.evaluate.report.svg import Markup, tag

BACKGROUND_STYLE = (
    "svg{background:var(--bg);font-family:system-ui,sans-serif}text.title{font-weight:600;font-size:13px}"
    "svg text.readable{stroke:var(--bg)}"
)

MARGIN_HEIGHT, TITLE_HEIGHT, LEGEND_HEIGHT, LETTER_WIDTH = 16.0, 40.0, 16.0, 5.9
"""Units of a drawing: around a chart, down to its legend, a row of that, and about a letter's width."""


def standalone_svg(*drawing: Any, width: float, height: float, enlarged: float = 1.0) -> str:
    """The text of an SVG file; width and height in the drawing's units, which it is shown `enlarged` times."""
    style = (resources.files("podscale.evaluate.report") / "style.css").read_text(encoding="utf-8")
    picture = tag(
        "svg",
        tag("style", Markup(style + BACKGROUND_STYLE)),
        drawing,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width:.0f} {height:.0f}",
        width=f"{enlarged * width:.0f}",
    )
    return f"{picture}\n"


def line_chart_svg(title: str, series: Sequence[LineSeries], *, y_unit: str = "", **options: Any) -> str:
    """A line chart with its title and legend, as the text of an SVG file; options: of `line_drawing`."""
    keys, row, at = [], 0, MARGIN_HEIGHT
    for one in series:
        width = LETTER_WIDTH * len(one.name) + 42.0
        if at + width > WIDTH + MARGIN_HEIGHT and at > MARGIN_HEIGHT:
            row, at = row + 1, MARGIN_HEIGHT
        y = TITLE_HEIGHT + LEGEND_HEIGHT * row
        dashed = " dashed" if one.dashed else ""
        keys.append(tag("line", x1=at, x2=at + 14, y1=y - 4, y2=y - 4, class_=f"line c{one.colour}{dashed}"))
        keys.append(tag("text", one.name, x=at + 19, y=y))
        at += width
    top = TITLE_HEIGHT + LEGEND_HEIGHT * (row + 1) + (LEGEND_HEIGHT if y_unit else 0.0)
    return standalone_svg(
        tag("text", title, x=MARGIN_HEIGHT, y=MARGIN_HEIGHT + 4, class_="title"),
        keys,
        tag("text", y_unit, x=MARGIN_HEIGHT, y=top - 4, class_="unit") if y_unit else None,
        tag("g", line_drawing(series, **options), transform=f"translate({MARGIN_HEIGHT:.0f} {top:.0f})"),
        width=WIDTH + 2 * MARGIN_HEIGHT,
        height=top + HEIGHT + MARGIN_HEIGHT / 2,
        enlarged=1.6,
    )


def dots_chart_svg(title: str, rows: Sequence[DotRow], *, unit: str = "", **options: Any) -> str:
    """Dots in rows with their title, as the text of an SVG file; options: of `dots_drawing`."""
    top = TITLE_HEIGHT + (LEGEND_HEIGHT / 2 if unit else 0.0)
    return standalone_svg(
        tag("text", title, x=MARGIN_HEIGHT, y=MARGIN_HEIGHT + 4, class_="title"),
        tag("text", unit, x=MARGIN_HEIGHT, y=TITLE_HEIGHT - 4, class_="unit") if unit else None,
        tag("g", dots_drawing(rows, **options), transform=f"translate({MARGIN_HEIGHT:.0f} {top:.0f})"),
        width=WIDTH + 2 * MARGIN_HEIGHT,
        height=top + dots_height(rows),
        enlarged=1.6,
    )
