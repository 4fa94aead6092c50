"""Dots in rows: what was measured of each of a few named things, every value and their mean."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from podscale.evaluate.report.charts.lines import LEFT, RIGHT, WIDTH
from podscale.evaluate.report.charts.scale import Scale, round_outwards
from podscale.evaluate.report.figures import format_short
from podscale.evaluate.report.svg import Markup, join_markup, tag

ROW_HEIGHT, FOOT_HEIGHT = 34.0, 34.0
"""Height of a row, and of the axis below them."""
PLOT_LEFT = LEFT / 2


@dataclass(frozen=True)
class DotRow:
    """A named row; note: what stands at its right end, such as its mean in figures."""

    name: str
    values: Sequence[float]
    colour: int = 1
    note: str = ""


def dots_height(rows: Sequence[DotRow]) -> float:
    return ROW_HEIGHT * len(rows) + FOOT_HEIGHT


def dots_drawing(rows: Sequence[DotRow], *, x_range: tuple[float, float] | None = None) -> Markup:
    """The rows from above, `WIDTH` by `dots_height`: the mean as a bar, over a level at that of the first row.

    `x_range` bounds the axis, which otherwise holds all values and is widened to round numbers.
    """
    values = [value for row in rows for value in row.values]
    low, high = round_outwards(min(values), max(values))
    if x_range is not None:
        low, high = max(low, x_range[0]), min(high, x_range[1])
    x = Scale(low, high, PLOT_LEFT, WIDTH - RIGHT)
    bottom = ROW_HEIGHT * len(rows)
    columns = [
        (
            tag("line", x1=x(v), x2=x(v), y1=0.0, y2=bottom, class_="grid"),
            tag("text", format_short(v), x=x(v), y=bottom + 16, text_anchor="middle"),
        )
        for v in x.ticks()
    ]
    first = x(fmean(rows[0].values)) if rows[0].values else None
    level = tag("line", x1=first, x2=first, y1=0.0, y2=bottom, class_="level") if first is not None else None
    return join_markup(columns, level, [_draw_row(row, ROW_HEIGHT * number, x) for number, row in enumerate(rows)])


def _draw_row(row: DotRow, top: float, x: Scale) -> list[Any]:
    at = top + 25.0
    drawn: list[Any] = [
        tag("text", row.name, x=PLOT_LEFT, y=top + 14, class_="readable"),
        tag("text", row.note, x=WIDTH - RIGHT, y=top + 14, text_anchor="end", class_="readable") if row.note else None,
        tag("line", x1=PLOT_LEFT, x2=WIDTH - RIGHT, y1=at, y2=at, class_="grid"),
    ]
    if row.values:
        mean = x(fmean(row.values))
        drawn.append(tag("line", x1=mean, x2=mean, y1=at - 7, y2=at + 7, class_=f"line c{row.colour}"))
    drawn += [
        tag(
            "circle",
            tag("title", f"{row.name}: {format_short(v)}"),
            cx=x(v),
            cy=at,
            r=3.4,
            class_=f"dot pale c{row.colour}",
        )
        for v in row.values
    ]
    return drawn


def dots_chart(title: str, rows: Sequence[DotRow], *, unit: str = "", **options: Any) -> Markup:
    """A titled figure; options: of `dots_drawing`."""
    return tag(
        "figure",
        tag("figcaption", tag("b", title), tag("span", unit, class_="unit") if unit else None),
        tag(
            "svg",
            dots_drawing(rows, **options),
            viewBox=f"0 0 {WIDTH:.0f} {dots_height(rows):.0f}",
            role="img",
            aria_label=title,
            class_="chart",
        ),
        class_="panel",
    )
