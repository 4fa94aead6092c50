"""The reliability diagram: accuracy by confidence, with the number of samples under it."""

from podscale.evaluate.report.charts.scale import Scale
from podscale.evaluate.report.figures import format_integer, format_percent
from podscale.evaluate.report.svg import Markup, tag
from podscale.evaluation.evaluation_json import CalibrationFigures

RELIABILITY_WIDTH, RELIABILITY_LEFT, RELIABILITY_RIGHT = 440.0, 50.0, 12.0


def reliability_diagram(title: str, figures: CalibrationFigures) -> Markup:
    """Bars are the accuracy of each bin; the diagonal is a perfectly calibrated model (Guo et al. 2017, figure 1)."""
    x = Scale(0, 1, RELIABILITY_LEFT, RELIABILITY_WIDTH - RELIABILITY_RIGHT)
    y = Scale(0, 1, 220, 12)
    most = max(figures.count) or 1
    below = Scale(0, most, 302, 246)
    bars, mass = [], []
    for i, number in enumerate(figures.count):
        low, high = figures.edges[i], figures.edges[i + 1]
        accuracy, confidence = figures.accuracy[i], figures.confidence[i]
        label = f"confidence {format_percent(low, 0)} to {format_percent(high, 0)}: {format_integer(number)} samples"
        if accuracy is not None and confidence is not None:
            full = f"{label}, {format_percent(accuracy)} right at a mean confidence of {format_percent(confidence)}"
            bars.append(_draw_bar(full, x(low), x(high), y(accuracy), 220, "fill c1 tint"))
            bars.append(tag("circle", cx=x(confidence), cy=y(accuracy), r=2.6, class_="dot c1 ring"))
        mass.append(_draw_bar(label, x(low), x(high), below(number), 302, "fill quiet"))
    grid = [
        (
            tag("line", x1=RELIABILITY_LEFT, x2=RELIABILITY_WIDTH - RELIABILITY_RIGHT, y1=y(v), y2=y(v), class_="grid"),
            tag("text", format_percent(v, 0), x=RELIABILITY_LEFT - 7, y=y(v) + 4, text_anchor="end"),
            tag("text", format_percent(v, 0), x=x(v), y=320, text_anchor="end" if v == 1 else "middle"),
        )
        for v in (0.0, 0.25, 0.5, 0.75, 1.0)
    ]
    diagonal = tag("line", x1=x(0), y1=y(0), x2=x(1), y2=y(1), class_="level strong")
    names = [
        tag("text", "accuracy", x=RELIABILITY_LEFT + 6, y=22, class_="unit"),
        tag("text", "samples", x=RELIABILITY_LEFT + 6, y=252, class_="unit"),
        tag("text", "confidence", x=RELIABILITY_WIDTH - RELIABILITY_RIGHT, y=336, text_anchor="end", class_="unit"),
    ]
    base = [
        tag("line", x1=RELIABILITY_LEFT, x2=RELIABILITY_WIDTH - RELIABILITY_RIGHT, y1=h, y2=h, class_="axis")
        for h in (220, 302)
    ]
    return tag(
        "figure",
        tag("figcaption", tag("b", title), tag("span", "dashed: perfectly calibrated", class_="unit")),
        tag(
            "svg", grid, bars, diagonal, mass, base, names,
            viewBox=f"0 0 {RELIABILITY_WIDTH:.0f} 342", role="img", aria_label=title, class_="chart",
        ),
        class_="panel",
    )  # fmt: skip


def _draw_bar(label: str, left: float, right: float, top: float, base: float, style: str) -> Markup:
    height = max(base - top, 0.0)
    return tag("rect", tag("title", label), x=left + 0.75, y=top, width=right - left - 1.5, height=height, class_=style)
