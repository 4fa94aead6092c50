"""Standalone SVG files of charts, dot charts, and charts of a run's schedules.

A dot chart has one named row per group, with every value and the mean. Schedules are learning rate, momentum and weight
decay by epoch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from statistics import fmean
from typing import Any

from podscale.config import TrainSection
from podscale.report.charts.lines import (
    HEIGHT,
    LEFT,
    RIGHT,
    WIDTH,
    LineSeries,
    Scale,
    line_chart,
    line_drawing,
    round_outwards,
)
from podscale.report.markup import Markup, format_short, join_markup, tag
from podscale.training import schedules

ROW_HEIGHT, FOOT_HEIGHT = 34.0, 34.0
"""Heights of a row and of the axis below the rows."""
PLOT_LEFT = LEFT / 2


@dataclass(frozen=True)
class DotRow:
    """A named row of a dot chart.

    Args:
        colour: number in the palette, from 1.
        note: text at the right end, such as the mean.
    """

    name: str
    values: Sequence[float]
    colour: int = 1
    note: str = ""


def dots_height(rows: Sequence[DotRow]) -> float:
    return ROW_HEIGHT * len(rows) + FOOT_HEIGHT


def dots_drawing(rows: Sequence[DotRow], *, x_range: tuple[float, float] | None = None) -> Markup:
    """Draw the rows from top to bottom, `WIDTH` by `dots_height`: the mean as a bar, the first row's mean as a level.

    Args:
        x_range: limits of the axis; default: the values, widened to round numbers.
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
    """Draw a titled figure; for the options see `dots_drawing`."""
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


BACKGROUND_STYLE = (
    "svg{background:var(--bg);font-family:system-ui,sans-serif}text.title{font-weight:600;font-size:13px}"
    "svg text.readable{stroke:var(--bg)}"
)

MARGIN_HEIGHT, TITLE_HEIGHT, LEGEND_HEIGHT, LETTER_WIDTH = 16.0, 40.0, 16.0, 5.9
"""Sizes in drawing units: margin, height of the title, height of a legend row, average width of a letter."""


def standalone_svg(*drawing: Any, width: float, height: float, enlarged: float = 1.0) -> str:
    """Return the text of an SVG file.

    Args:
        width: in drawing units.
        height: in drawing units.
        enlarged: pixels per drawing unit.
    """
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


def line_chart_svg(title: str, series: Sequence[LineSeries], *, y_unit: str = "", **options: Any) -> str:
    """Return a line chart with title and legend as the text of an SVG file; for the options see `line_drawing`."""
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
    """Return a dot chart with title as the text of an SVG file; for the options see `dots_drawing`."""
    top = TITLE_HEIGHT + (LEGEND_HEIGHT / 2 if unit else 0.0)
    return standalone_svg(
        tag("text", title, x=MARGIN_HEIGHT, y=MARGIN_HEIGHT + 4, class_="title"),
        tag("text", unit, x=MARGIN_HEIGHT, y=TITLE_HEIGHT - 4, class_="unit") if unit else None,
        tag("g", dots_drawing(rows, **options), transform=f"translate({MARGIN_HEIGHT:.0f} {top:.0f})"),
        width=WIDTH + 2 * MARGIN_HEIGHT,
        height=top + dots_height(rows),
        enlarged=1.6,
    )


COLUMN_TITLES = {"learning_rate": "Learning rate", "momentum": "Momentum", "weight_decay": "Weight decay"}
COLUMN_COLOURS = {"learning_rate": 4, "momentum": 1, "weight_decay": 2}
assert list(COLUMN_TITLES) == list(schedules.COLUMNS)

Curves = dict[str, list[tuple[float, float]]]
"""Points (epoch, value) by schedule column."""

_GAP = 28.0


def schedule_curves(train: TrainSection, samples: int) -> Curves:
    """Return the schedule columns that change during the run, and always the learning rate."""
    epochs, values = schedules.sample_for_plot(train, samples)
    found = {name: list(zip(epochs.tolist(), column.tolist(), strict=True)) for name, column in _column_values(values)}
    changing = (name for name, points in found.items() if len({value for _, value in points}) > 1)
    return {name: found[name] for name in dict.fromkeys(["learning_rate", *changing])}


def schedule_chart(name: str, points: list[tuple[float, float]]) -> Markup:
    """Draw one schedule column as a figure of the report."""
    return line_chart(COLUMN_TITLES[name], [_column_series(name, points)], y_range=_value_range(name, points))


def schedule_svg(curves: Curves) -> str:
    """Draw all schedule columns below each other; return the text of an SVG file."""
    panels = [
        tag(
            "g",
            tag("text", COLUMN_TITLES[name], x=0.0, y=0.0, class_="title"),
            line_drawing([_column_series(name, points)], y_range=_value_range(name, points), max_points=len(points)),
            transform=f"translate(16 {_GAP + number * (HEIGHT + _GAP):.0f})",
        )
        for number, (name, points) in enumerate(curves.items())
    ]
    return standalone_svg(panels, width=WIDTH + 32, height=len(curves) * (HEIGHT + _GAP) + _GAP, enlarged=2)


def _column_values(values: schedules.FloatArray) -> list[tuple[str, schedules.FloatArray]]:
    return [(name, values[:, number]) for number, name in enumerate(schedules.COLUMNS)]


def _column_series(name: str, points: list[tuple[float, float]]) -> LineSeries:
    return LineSeries(COLUMN_TITLES[name], points, COLUMN_COLOURS[name])


def _value_range(name: str, points: list[tuple[float, float]]) -> tuple[float, float]:
    """Return the vertical range: from zero for rates and decays, the range of the values for momentum."""
    high = max(value for _, value in points)
    low = min(value for _, value in points) if name == "momentum" else 0.0
    return round_outwards(low, high or 1.0)
