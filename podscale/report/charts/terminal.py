"""Charts of the schedules as text for a terminal."""

from podscale.report.charts.standalone import COLUMN_TITLES, Curves

ROWS = 8
LEFT_CHARACTERS = 11
"""Width of the labels left of the axis."""
EIGHTHS = " ▁▂▃▄▅▆▇█"


def terminal_chart(curves: Curves, epochs: float, width: int) -> str:
    """Draw each curve of a run of `epochs` as filled columns, `width` characters wide."""
    columns = max(20, width - LEFT_CHARACTERS - 1)
    return "\n\n".join(_draw_curve(COLUMN_TITLES[name], points, epochs, columns) for name, points in curves.items())


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
