"""Line charts with linear and logarithmic scales; long series are decimated to keep the drawing small."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from podscale.report.markup import Markup, format_short, join_markup, tag


@dataclass(frozen=True)
class Scale:
    """Linear or logarithmic map from low..high to start..end (pixels)."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        a, b, v = (math.log10(x) if self.log else x for x in (self.low, self.high, value))
        share = (v - a) / (b - a)
        return self.start + share * (self.end - self.start)

    def ticks(self, about: int = 5) -> list[float]:
        """Return about `about` round values inside the range.

        A logarithmic scale has powers of ten, with 2 and 5 between if those are few.
        """
        if not self.log:
            return linear_ticks(self.low, self.high, about)
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        factors = (1.0,) if last - first > 2 else (1.0, 2.0, 5.0)
        values = [f * 10.0**e for e in range(first, last + 1) for f in factors]
        return [v for v in values if self.low * 0.999 <= v <= self.high * 1.001]


def linear_ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Return about `about` multiples of 1, 2 or 5 times a power of ten inside [low, high]."""
    step = _round_step((high - low) / max(1, about))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def round_outwards(low: float, high: float, about: int = 5) -> tuple[float, float]:
    """Widen the range to the next ticks; an empty range gets a margin on both sides."""
    if high <= low:
        room = abs(low) * 0.1 or 1.0
        low, high = low - room, high + room
    step = _round_step((high - low) / max(1, about))
    return math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step


def _round_step(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return next(f * power for f in (1.0, 2.0, 5.0, 10.0) if step <= f * power * 1.0001)


WIDTH, HEIGHT = 440.0, 236.0
LEFT, RIGHT, TOP, BOTTOM = 50.0, 12.0, 14.0, 40.0
MAX_POINTS = 240
HEADROOM = 1.12
"""Factor by which a logarithmic horizontal axis extends on both sides."""


@dataclass(frozen=True)
class LineSeries:
    """A named line.

    Args:
        points: (x, y) by rising x.
        colour: number in the palette, from 1.
        dots: mark every point.
        spread: half width at each point, drawn as bars with dots, else as a band.
        dashed: distinguishes two lines of one colour.
    """

    name: str
    points: Sequence[tuple[float, float]]
    colour: int = 1
    dots: bool = False
    spread: Sequence[float] = ()
    dashed: bool = False


def line_chart(
    title: str,
    series: Sequence[LineSeries],
    *,
    y_unit: str = "",
    x_unit: str = "epoch",
    y_range: tuple[float, float] | None = None,
    log: bool = False,
    show: Callable[[float], str] = format_short,
    x_high: float | None = None,
    mark: float | None = None,
    mark_name: str = "",
    log_x: bool = False,
    x_ticks: Sequence[float] = (),
    x_marks: Sequence[tuple[float, int]] = (),
) -> Markup:
    """Draw a titled figure with axes, units and hover values; for the options see `line_drawing`."""
    drawn = [s for s in series if s.points]
    body = line_drawing(
        drawn,
        x_unit=x_unit,
        y_range=y_range,
        log=log,
        show=show,
        x_high=x_high,
        mark=mark,
        log_x=log_x,
        x_ticks=x_ticks,
        x_marks=x_marks,
    )
    legend = [tag("span", tag("i", class_=_legend(s)), s.name) for s in drawn] if len(drawn) > 1 else []
    if mark is not None:
        legend.append(tag("span", tag("i", class_="key dash"), f"{mark_name} {show(mark)}"))
    unit = tag("span", y_unit, class_="unit") if y_unit else None
    return tag(
        "figure",
        tag("figcaption", tag("b", title), unit, tag("span", legend, class_="legend") if legend else None),
        tag("svg", body, viewBox=f"0 0 {WIDTH:.0f} {HEIGHT:.0f}", role="img", aria_label=title, class_="chart"),
        class_="panel",
    )


def _legend(series: LineSeries) -> str:
    return f"key c{series.colour}{' hollow' if series.dashed else ''}"


def line_drawing(
    series: Sequence[LineSeries],
    *,
    x_unit: str = "epoch",
    y_range: tuple[float, float] | None = None,
    log: bool = False,
    show: Callable[[float], str] = format_short,
    x_high: float | None = None,
    mark: float | None = None,
    max_points: int = MAX_POINTS,
    log_x: bool = False,
    x_ticks: Sequence[float] = (),
    x_marks: Sequence[tuple[float, int]] = (),
) -> Markup:
    """Draw a chart of `WIDTH` by `HEIGHT` for an svg element.

    Args:
        y_range: vertical range; default: that of the values.
        log: use a logarithmic vertical axis if the values span more than a factor of 20.
        show: formats a value.
        x_high: least end of the horizontal axis, so that charts side by side agree.
        mark: value of a dashed level, such as the claim.
        max_points: points per line, above which lines are decimated.
        log_x: use a logarithmic horizontal axis.
        x_ticks: ticks instead of round numbers.
        x_marks: dashed verticals as (x, colour).
    """
    drawn = [_decimated(s, max_points) for s in series]
    xs = [*(x for s in drawn for x, _ in s.points), *(x for x, _ in x_marks), *x_ticks]
    ys = [y for s in drawn for low, high in _extent(s) for y in (low, high)] + ([] if mark is None else [mark])
    log = log and min(ys) > 0 and max(ys) / min(ys) > 20
    low, high = y_range or ((min(ys), max(ys)) if log else round_outwards(min(ys), max(ys)))
    last = max(xs) if x_high is None else max(x_high, *xs)
    x = Scale(
        min(xs) / HEADROOM if log_x else 0.0, (last or 1.0) * (HEADROOM if log_x else 1.0), LEFT, WIDTH - RIGHT, log_x
    )
    y = Scale(low, high, HEIGHT - BOTTOM, TOP, log)
    return join_markup(
        _draw_axes(x, y, x_unit, show, x_ticks or x.ticks(6)),
        [
            tag("line", x1=x(v), x2=x(v), y1=TOP, y2=HEIGHT - BOTTOM, class_=f"level tinted c{colour}")
            for v, colour in x_marks
        ],
        tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y(mark), y2=y(mark), class_="level") if mark is not None else None,
        [_draw_spread(s, x, y) for s in drawn if s.spread],
        [_draw_line(s, x, y) for s in drawn],
        [_draw_hover(s, x, y, x_unit, show, len(drawn) > 1) for s in reversed(drawn)],
    )


def decimate(points: Sequence[tuple[float, float]], limit: int) -> list[tuple[float, float]]:
    """Reduce to about `limit` points: the lowest and the highest of each bucket, so that no spike is lost."""
    if len(points) <= limit:
        return list(points)
    buckets = limit // 2
    kept: list[tuple[float, float]] = []
    for i in range(buckets):
        inside = points[i * len(points) // buckets : (i + 1) * len(points) // buckets]
        extremes = {min(inside, key=lambda p: p[1]), max(inside, key=lambda p: p[1])}
        kept.extend(sorted(extremes))
    return [points[0], *(p for p in kept if p not in (points[0], points[-1])), points[-1]]


def _decimated(series: LineSeries, limit: int) -> LineSeries:
    points = decimate(series.points, limit)
    by_point = dict(zip(series.points, series.spread, strict=True)) if series.spread else {}
    return replace(series, points=points, spread=[by_point[point] for point in points] if by_point else ())


def _extent(series: LineSeries) -> list[tuple[float, float]]:
    """Return the lowest and highest value drawn at each point."""
    spread = series.spread or [0.0] * len(series.points)
    return [(y - d, y + d) for (_, y), d in zip(series.points, spread, strict=True)]


def _draw_spread(series: LineSeries, x: Scale, y: Scale) -> Any:
    """Draw bars at the dots of a line, or a band around it."""
    ends = [(x(a), _clip_height(y(low)), _clip_height(y(high))) for (a, _), (low, high) in _band_extent(series)]
    if series.dots:
        return [tag("line", x1=a, x2=a, y1=low, y2=high, class_=f"bar c{series.colour}") for a, low, high in ends]
    outline = [*((a, high) for a, _, high in ends), *((a, low) for a, low, _ in reversed(ends))]
    return tag("polygon", points=" ".join(f"{a:.1f},{b:.1f}" for a, b in outline), class_=f"band c{series.colour}")


def _band_extent(series: LineSeries) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    return list(zip(series.points, _extent(series), strict=True))


def _draw_axes(x: Scale, y: Scale, x_unit: str, show: Callable[[float], str], x_ticks: Sequence[float]) -> list[Any]:
    rows = [
        (
            tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y(v), y2=y(v), class_="grid"),
            tag("text", show(v), x=LEFT - 7, y=y(v) + 4, text_anchor="end"),
        )
        for v in y.ticks()
    ]
    columns = [
        (
            tag("line", x1=x(v), x2=x(v), y1=HEIGHT - BOTTOM, y2=HEIGHT - BOTTOM + 4, class_="axis"),
            tag("text", format_short(v), x=x(v), y=HEIGHT - BOTTOM + 18, text_anchor="middle"),
        )
        for v in x_ticks
    ]
    base = tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=HEIGHT - BOTTOM, y2=HEIGHT - BOTTOM, class_="axis")
    name = tag("text", x_unit, x=WIDTH - RIGHT, y=HEIGHT - 5, text_anchor="end", class_="unit")
    return [rows, base, columns, name]


def _draw_line(series: LineSeries, x: Scale, y: Scale) -> list[Any]:
    path = "".join(f"{'L' if i else 'M'}{x(a):.1f} {_clip_height(y(b)):.1f}" for i, (a, b) in enumerate(series.points))
    dots = [
        tag("circle", cx=x(a), cy=_clip_height(y(b)), r=2.4, class_=f"dot c{series.colour}")
        for a, b in (series.points if series.dots or len(series.points) == 1 else ())
    ]
    return [tag("path", d=path, class_=f"line c{series.colour}{' dashed' if series.dashed else ''}"), dots]


def _draw_hover(
    series: LineSeries, x: Scale, y: Scale, x_unit: str, show: Callable[[float], str], named: bool
) -> list[Markup]:
    """Draw an invisible target per point; hovering shows the point and its value by CSS."""
    found = []
    for a, b in series.points:
        at, height = x(a), _clip_height(y(b))
        label = f"{show(b)} at {x_unit} {format_short(a)}"
        label = f"{series.name}: {label}" if named else label
        found.append(
            tag(
                "g",
                tag("title", label),
                tag("circle", cx=at, cy=height, r=8.0, class_="target"),
                tag("circle", cx=at, cy=height, r=3.6, class_=f"spot c{series.colour}"),
                tag("text", label, x=WIDTH - RIGHT, y=10.0, text_anchor="end", class_="readout"),
                class_="at",
            )
        )
    return found


def _clip_height(height: float) -> float:
    return min(max(height, TOP), HEIGHT - BOTTOM)
