"""Line charts with linear and logarithmic scales; long series are decimated to keep the file small."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from podscale.report.markup import Markup, chart_figure, format_short, join_markup, tag


@dataclass(frozen=True)
class Scale:
    """Linear or logarithmic map from [low, high] to [start, end] in pixels."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Return the position of a value, in pixels."""
        a, b, v = (math.log10(x) if self.log else x for x in (self.low, self.high, value))
        share = (v - a) / (b - a)
        return self.start + share * (self.end - self.start)

    def ticks(self, about: int = 5) -> list[float]:
        """Return about `about` round values in the range.

        A logarithmic scale has powers of ten, and 2 and 5 times them if those are few.
        """
        if not self.log:
            return linear_ticks(self.low, self.high, about)
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        factors = (1.0,) if last - first > 2 else (1.0, 2.0, 5.0)
        values = [f * 10.0**e for e in range(first, last + 1) for f in factors]
        return [v for v in values if self.low * 0.999 <= v <= self.high * 1.001]


def linear_ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Return about `about` multiples of 1, 2 or 5 times a power of ten in [low, high]."""
    step = _round_step((high - low) / max(1, about))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def round_outwards(low: float, high: float) -> tuple[float, float]:
    """Widen the range from `low` to `high` to the next ticks; an empty range gets a margin on both sides."""
    if high <= low:
        margin = abs(low) * 0.1 or 1.0
        low, high = low - margin, high + margin
    step = _round_step((high - low) / 5)
    return math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step


def _round_step(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return next(f * power for f in (1.0, 2.0, 5.0, 10.0) if step <= f * power * 1.0001)


WIDTH, HEIGHT = 440.0, 236.0
LEFT, RIGHT, TOP, BOTTOM = 50.0, 12.0, 14.0, 40.0
MAX_POINTS = 240
HEADROOM = 1.12
"""Factor that extends a logarithmic horizontal axis on both sides."""


@dataclass(frozen=True)
class LineSeries:
    """Named line.

    Args:
        points: (x, y) by rising x.
        colour: Number in the palette, from 1.
        dots: Mark every point.
        spread: Half width at each point, drawn as bars with dots, else as a band.
        dashed: To distinguish lines of one colour.
    """

    name: str
    points: Sequence[tuple[float, float]]
    colour: int = 1
    dots: bool = False
    spread: Sequence[float] = ()
    dashed: bool = False


@dataclass(frozen=True)
class XAxis:
    """Horizontal axis, from 0 unless it is logarithmic.

    Args:
        high: Least upper end, so that charts side by side agree.
        ticks: Ticks instead of round numbers.
    """

    label: str = "epoch"
    high: float | None = None
    log: bool = False
    ticks: Sequence[float] = ()


@dataclass(frozen=True)
class YAxis:
    """Vertical axis.

    Args:
        limits: Lowest and highest value; default: those of the lines.
        log: Logarithmic if the values span more than a factor of 20.
    """

    label: str = ""
    limits: tuple[float, float] | None = None
    log: bool = False
    format: Callable[[float], str] = format_short


@dataclass(frozen=True)
class ReferenceLine:
    """Dashed line across the chart; a horizontal one has a `label` in the legend, a vertical one a palette `colour`."""

    value: float
    label: str = ""
    colour: int = 1


DEFAULT_X, DEFAULT_Y = XAxis(), YAxis()


def line_chart(
    title: str,
    series: Sequence[LineSeries],
    *,
    x: XAxis = DEFAULT_X,
    y: YAxis = DEFAULT_Y,
    hline: ReferenceLine | None = None,
    vlines: Sequence[ReferenceLine] = (),
) -> Markup:
    """Draw a titled figure with axes, units and hover values; omit series without points."""
    drawn = [line for line in series if line.points]
    body = line_drawing(drawn, x=x, y=y, hline=hline, vlines=vlines)
    legend = [tag("span", tag("i", class_=_legend_class(line)), line.name) for line in drawn] if len(drawn) > 1 else []
    if hline is not None:
        legend.append(tag("span", tag("i", class_="key dash"), f"{hline.label} {y.format(hline.value)}"))
    unit = tag("span", y.label, class_="unit") if y.label else None
    caption = [unit, tag("span", legend, class_="legend") if legend else None]
    return chart_figure(title, WIDTH, HEIGHT, body, caption=caption)


def line_drawing(
    series: Sequence[LineSeries],
    *,
    x: XAxis = DEFAULT_X,
    y: YAxis = DEFAULT_Y,
    hline: ReferenceLine | None = None,
    vlines: Sequence[ReferenceLine] = (),
    max_points: int = MAX_POINTS,
) -> Markup:
    """Draw a chart of `WIDTH` by `HEIGHT` for an svg element; lines of more than `max_points` are decimated."""
    drawn = [_decimate_series(line, max_points) for line in series]
    to_x, to_y = _x_scale(drawn, x, vlines), _y_scale(drawn, y, hline)
    return join_markup(
        _draw_axes(to_x, to_y, x, y),
        [vertical_line(to_x(line.value), TOP, HEIGHT - BOTTOM, f"level tinted c{line.colour}") for line in vlines],
        horizontal_line(to_y(hline.value), "level") if hline is not None else None,
        [_draw_spread(line, to_x, to_y) for line in drawn if line.spread],
        [_draw_line(line, to_x, to_y) for line in drawn],
        [_draw_hover(line, to_x, to_y, x.label, y.format, len(drawn) > 1) for line in reversed(drawn)],
    )


def horizontal_line(y: float, style: str, left: float = LEFT) -> Markup:
    """Draw a line from `left` to the right edge of the plot at height `y`, in drawing units."""
    return tag("line", x1=left, x2=WIDTH - RIGHT, y1=y, y2=y, class_=style)


def vertical_line(x: float, top: float, bottom: float, style: str) -> Markup:
    """Draw a line at `x` from `top` to `bottom`, in drawing units."""
    return tag("line", x1=x, x2=x, y1=top, y2=bottom, class_=style)


def decimate(points: Sequence[tuple[float, float]], limit: int) -> list[tuple[float, float]]:
    """Reduce to about `limit` points: the lowest and the highest of each bucket, so that no spike is lost."""
    if len(points) <= limit:
        return list(points)
    buckets = limit // 2
    extremes: list[tuple[float, float]] = []
    for i in range(buckets):
        bucket = points[i * len(points) // buckets : (i + 1) * len(points) // buckets]
        extremes += sorted({min(bucket, key=lambda p: p[1]), max(bucket, key=lambda p: p[1])})
    return [points[0], *(p for p in extremes if p not in (points[0], points[-1])), points[-1]]


def _legend_class(series: LineSeries) -> str:
    return f"key c{series.colour}{' hollow' if series.dashed else ''}"


def _x_scale(series: Sequence[LineSeries], axis: XAxis, vlines: Sequence[ReferenceLine]) -> Scale:
    xs = [*(x for line in series for x, _ in line.points), *(line.value for line in vlines), *axis.ticks]
    last = max(xs) if axis.high is None else max(axis.high, *xs)
    low, headmargin = (min(xs) / HEADROOM, HEADROOM) if axis.log else (0.0, 1.0)
    return Scale(low, (last or 1.0) * headmargin, LEFT, WIDTH - RIGHT, axis.log)


def _y_scale(series: Sequence[LineSeries], axis: YAxis, hline: ReferenceLine | None) -> Scale:
    ys = [y for line in series for interval in _intervals(line) for y in interval]
    ys += [] if hline is None else [hline.value]
    log = axis.log and min(ys) > 0 and max(ys) / min(ys) > 20
    low, high = axis.limits or ((min(ys), max(ys)) if log else round_outwards(min(ys), max(ys)))
    return Scale(low, high, HEIGHT - BOTTOM, TOP, log)


def _decimate_series(series: LineSeries, limit: int) -> LineSeries:
    points = decimate(series.points, limit)
    by_point = dict(zip(series.points, series.spread, strict=True)) if series.spread else {}
    return replace(series, points=points, spread=[by_point[point] for point in points] if by_point else ())


def _intervals(series: LineSeries) -> list[tuple[float, float]]:
    """Return the lowest and highest value drawn at each point."""
    spread = series.spread or [0.0] * len(series.points)
    return [(y - d, y + d) for (_, y), d in zip(series.points, spread, strict=True)]


def _draw_spread(series: LineSeries, to_x: Scale, to_y: Scale) -> Any:
    """Draw bars at the dots of a line, or a band around it."""
    intervals = zip(series.points, _intervals(series), strict=True)
    ends = [(to_x(x), _clip_height(to_y(low)), _clip_height(to_y(high))) for (x, _), (low, high) in intervals]
    if series.dots:
        return [vertical_line(x, low, high, f"bar c{series.colour}") for x, low, high in ends]
    boundary = [*((x, high) for x, _, high in ends), *((x, low) for x, low, _ in reversed(ends))]
    return tag("polygon", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in boundary), class_=f"band c{series.colour}")


def _draw_axes(to_x: Scale, to_y: Scale, x: XAxis, y: YAxis) -> list[Any]:
    base = HEIGHT - BOTTOM
    rows = [
        (horizontal_line(to_y(v), "grid"), tag("text", y.format(v), x=LEFT - 7, y=to_y(v) + 4, text_anchor="end"))
        for v in to_y.ticks()
    ]
    columns = [
        (
            vertical_line(to_x(v), base, base + 4, "axis"),
            tag("text", format_short(v), x=to_x(v), y=base + 18, text_anchor="middle"),
        )
        for v in x.ticks or to_x.ticks(6)
    ]
    label = tag("text", x.label, x=WIDTH - RIGHT, y=HEIGHT - 5, text_anchor="end", class_="unit")
    return [rows, horizontal_line(base, "axis"), columns, label]


def _draw_line(series: LineSeries, to_x: Scale, to_y: Scale) -> list[Any]:
    points = [(to_x(x), _clip_height(to_y(y))) for x, y in series.points]
    path = "".join(f"{'L' if i else 'M'}{x:.1f} {y:.1f}" for i, (x, y) in enumerate(points))
    dotted = points if series.dots or len(points) == 1 else []
    dots = [tag("circle", cx=x, cy=y, r=2.4, class_=f"dot c{series.colour}") for x, y in dotted]
    return [tag("path", d=path, class_=f"line c{series.colour}{' dashed' if series.dashed else ''}"), dots]


def _draw_hover(
    series: LineSeries, to_x: Scale, to_y: Scale, x_label: str, y_format: Callable[[float], str], named: bool
) -> list[Markup]:
    """Draw an invisible target at each point, which shows the point and its value on hover by CSS."""
    targets = []
    for x, y in series.points:
        cx, cy = to_x(x), _clip_height(to_y(y))
        label = f"{f'{series.name}: ' if named else ''}{y_format(y)} at {x_label} {format_short(x)}"
        targets.append(
            tag(
                "g",
                tag("title", label),
                tag("circle", cx=cx, cy=cy, r=8.0, class_="target"),
                tag("circle", cx=cx, cy=cy, r=3.6, class_=f"spot c{series.colour}"),
                tag("text", label, x=WIDTH - RIGHT, y=10.0, text_anchor="end", class_="readout"),
                class_="at",
            )
        )
    return targets


def _clip_height(height: float) -> float:
    return min(max(height, TOP), HEIGHT - BOTTOM)
