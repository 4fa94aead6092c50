"""Charts of a run's schedules by epoch: in its report, as an SVG file, and as text for a terminal.

Schedules are the learning rate, momentum, weight decay and the global batch.
"""

from podscale.config import TrainSection
from podscale.report.charts.lines import HEIGHT, WIDTH, LineSeries, YAxis, line_chart, line_drawing, round_outwards
from podscale.report.charts.standalone import standalone_svg
from podscale.report.markup import Markup, tag
from podscale.training import schedules

COLUMN_TITLES = {
    "learning_rate": "Learning rate",
    "momentum": "Momentum",
    "weight_decay": "Weight decay",
    "global_batch": "Global batch",
}
COLUMN_COLOURS = {"learning_rate": 4, "momentum": 1, "weight_decay": 2, "global_batch": 3}
assert list(COLUMN_TITLES) == list(schedules.PLOT_COLUMNS)

Curves = dict[str, list[tuple[float, float]]]
"""Points (epoch, value) by schedule column."""
SCHEDULE_GAP = 28.0
"""Space above each schedule in an SVG file, drawing units."""
ROWS = 8
"""Height of a curve in a terminal, lines."""
LEFT_CHARACTERS = 11
"""Width of the labels left of the axis."""
EIGHTHS = " ▁▂▃▄▅▆▇█"


def schedule_curves(train: TrainSection, samples: int) -> Curves:
    """Return the learning rate and the other schedule columns that change during a run over `samples` images."""
    epochs, table = schedules.sample_for_plot(train, samples)
    curves = {
        name: list(zip(epochs.tolist(), table[:, number].tolist(), strict=True))
        for number, name in enumerate(schedules.PLOT_COLUMNS)
    }
    changing = (name for name, points in curves.items() if len({value for _, value in points}) > 1)
    return {name: curves[name] for name in dict.fromkeys(["learning_rate", *changing])}


def schedule_chart(name: str, points: list[tuple[float, float]]) -> Markup:
    return line_chart(COLUMN_TITLES[name], [_column_series(name, points)], y=_column_axis(name, points))


def schedule_svg(curves: Curves) -> str:
    """Return the text of an SVG file with all schedule columns below each other."""
    panels = [
        tag(
            "g",
            tag("text", COLUMN_TITLES[name], x=0.0, y=0.0, class_="title"),
            line_drawing([_column_series(name, points)], y=_column_axis(name, points), max_points=len(points)),
            transform=f"translate(16 {SCHEDULE_GAP + number * (HEIGHT + SCHEDULE_GAP):.0f})",
        )
        for number, (name, points) in enumerate(curves.items())
    ]
    height = len(curves) * (HEIGHT + SCHEDULE_GAP) + SCHEDULE_GAP
    return standalone_svg(panels, width=WIDTH + 32, height=height, enlarged=2)


def terminal_chart(curves: Curves, epochs: float, width: int) -> str:
    """Draw each curve of a run of `epochs` as filled columns, `width` characters wide."""
    columns = max(20, width - LEFT_CHARACTERS - 1)
    return "\n\n".join(_draw_curve(COLUMN_TITLES[name], points, epochs, columns) for name, points in curves.items())


def _column_series(name: str, points: list[tuple[float, float]]) -> LineSeries:
    return LineSeries(COLUMN_TITLES[name], points, COLUMN_COLOURS[name])


def _column_axis(name: str, points: list[tuple[float, float]]) -> YAxis:
    """Return an axis over the values for momentum, from zero for the other columns."""
    high = max(value for _, value in points)
    low = min(value for _, value in points) if name == "momentum" else 0.0
    return YAxis(limits=round_outwards(low, high or 1.0))


def _draw_curve(title: str, points: list[tuple[float, float]], epochs: float, columns: int) -> str:
    """Draw the value in the middle of each column, in eighths of a row."""
    heights, high = [], max(value for _, value in points) or 1.0
    position = 0
    for column in range(columns):
        middle = (column + 0.5) * epochs / columns
        while position + 1 < len(points) and points[position + 1][0] <= middle:
            position += 1
        heights.append(round(8 * ROWS * points[position][1] / high))
    left = LEFT_CHARACTERS - 2
    rows = [
        f"{_row_label(row, high):>{left}} |{''.join(EIGHTHS[min(8, max(0, h - 8 * row))] for h in heights)}"
        for row in reversed(range(ROWS))
    ]
    axis = f"{'0':>{left}} +{'-' * columns}"
    scale = f"{'':{LEFT_CHARACTERS}}0{f'{epochs:g} epochs':>{columns - 1}}"
    return "\n".join([title, *rows, axis, scale])


def _row_label(row: int, high: float) -> str:
    """Return the value at the top of the highest and the middle row, else an empty string."""
    return f"{high * (row + 1) / ROWS:.4g}" if row + 1 in (ROWS, ROWS // 2) else ""
