"""The schedules of a run as charts: learning rate, momentum and weight decay over its epochs."""

from podscale.config import TrainSection
from podscale.evaluate.report.charts.lines import HEIGHT, WIDTH, LineSeries, line_chart, line_drawing
from podscale.evaluate.report.charts.scale import round_outwards
from podscale.evaluate.report.charts.standalone import standalone_svg
from podscale.evaluate.report.svg import Markup, tag
from podscale.training import schedules

COLUMN_TITLES = {"learning_rate": "Learning rate", "momentum": "Momentum", "weight_decay": "Weight decay"}
COLUMN_COLOURS = {"learning_rate": 4, "momentum": 1, "weight_decay": 2}
assert list(COLUMN_TITLES) == list(schedules.COLUMNS)

Curves = dict[str, list[tuple[float, float]]]
"""Points (epoch, value) by the column's name."""

_GAP = 28.0


def schedule_curves(train: TrainSection, samples: int) -> Curves:
    """The columns of the schedule that change during the run; the learning rate is always among them."""
    epochs, values = schedules.sample_for_plot(train, samples)
    found = {name: list(zip(epochs.tolist(), column.tolist(), strict=True)) for name, column in _column_values(values)}
    changing = (name for name, points in found.items() if len({value for _, value in points}) > 1)
    return {name: found[name] for name in dict.fromkeys(["learning_rate", *changing])}


def schedule_chart(name: str, points: list[tuple[float, float]]) -> Markup:
    """One column as a figure of the report."""
    return line_chart(COLUMN_TITLES[name], [_column_series(name, points)], y_range=_value_range(name, points))


def schedule_svg(curves: Curves) -> str:
    """All columns under each other, as the text of a file of its own."""
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
    """Rates and decays compare from zero; momentum shows the part where it moves."""
    high = max(value for _, value in points)
    low = min(value for _, value in points) if name == "momentum" else 0.0
    return round_outwards(low, high or 1.0)
