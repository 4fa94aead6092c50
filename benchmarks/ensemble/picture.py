"""The differences to one long run as a drawing: every seed a dot, the mean with its 95 % interval beside them."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.ensemble.rows import Spread
from podscale.report.charts.lines import Scale, round_outwards
from podscale.report.charts.standalone import MARGIN_HEIGHT, standalone_svg
from podscale.report.markup import Markup, format_short, tag

WIDTH, LEFT, ROW, TOP, FOOT = 560.0, 236.0, 21.0, 40.0, 42.0


def picture(title: str, differences: Mapping[str, Sequence[float]]) -> str:
    """The text of an SVG file. differences: in points, seed by seed, by the name of the row."""
    spreads = {name: Spread.of(values) for name, values in differences.items()}
    ends = [v for name, values in differences.items() for v in (*values, *_ends(spreads[name]), 0.0)]
    x = Scale(*round_outwards(min(ends), max(ends)), LEFT, WIDTH - MARGIN_HEIGHT)
    bottom = TOP + ROW * len(differences)
    ticks = [
        (
            tag("line", x1=x(v), x2=x(v), y1=TOP, y2=bottom, class_="grid"),
            tag("text", format_short(v), x=x(v), y=bottom + 16, text_anchor="middle"),
        )
        for v in x.ticks(6)
    ]
    drawn = [
        _row(name, values, spreads[name], x, TOP + ROW * (number + 0.5))
        for number, (name, values) in enumerate(differences.items())
    ]
    foot = "points of top-1 more than one long run; dots: seeds, bars: mean and 95 %"
    return standalone_svg(
        tag("text", title, x=MARGIN_HEIGHT, y=MARGIN_HEIGHT + 4, class_="title"),
        ticks,
        tag("line", x1=x(0.0), x2=x(0.0), y1=TOP, y2=bottom, class_="level"),
        drawn,
        tag("text", foot, x=WIDTH - MARGIN_HEIGHT, y=bottom + 34, text_anchor="end", class_="unit"),
        width=WIDTH,
        height=bottom + FOOT,
        enlarged=1.5,
    )


def _row(name: str, values: Sequence[float], spread: Spread, x: Scale, y: float) -> list[Any]:
    colour = f"c{(8, 3, 2)[spread.sign]}"
    low, high = _ends(spread)
    label = f"{name}: {spread.mean:+.2f}" + ("" if spread.half is None else f" ± {spread.half:.2f}")
    dots: list[Markup] = [tag("circle", cx=x(v), cy=y + 5, r=2.2, class_="fill quiet") for v in values]
    return [
        tag("text", name, x=LEFT - 10, y=y + 4, text_anchor="end"),
        dots,
        tag("line", x1=x(low), x2=x(high), y1=y - 2, y2=y - 2, class_=f"bar {colour}"),
        tag("circle", tag("title", label), cx=x(spread.mean), cy=y - 2, r=4.0, class_=f"dot {colour}"),
    ]


def _ends(spread: Spread) -> tuple[float, float]:
    half = spread.half or 0.0
    return spread.mean - half, spread.mean + half
