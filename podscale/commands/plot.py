"""`podscale config RUN --plot`: the schedules of a run, on a terminal and as an SVG file."""

from pathlib import Path

from podscale.config import RunConfig
from podscale.config.preflight import shard_set_counts
from podscale.errors import InputError
from podscale.report.charts.standalone import COLUMN_TITLES, Curves, schedule_curves, schedule_svg
from podscale.util.terminal import terminal_width

IMAGENET_IMAGES = 1_281_167
"""Training images assumed while no shards are made; only momentum corrections depend on it."""
_ROWS = 8
_LEFT = 11
_EIGHTHS = " ▁▂▃▄▅▆▇█"


def plot_schedules(config: RunConfig, svg: Path | None) -> str:
    """The schedules as text for a terminal; also written to `svg`, where one is given."""
    samples = shard_set_counts(config).get("train", IMAGENET_IMAGES)
    curves = schedule_curves(config.train, samples)
    if svg is not None:
        try:
            svg.write_text(schedule_svg(curves), encoding="utf-8")
        except OSError as error:
            raise InputError(f"cannot write the drawing: {error.strerror}", field=str(svg)) from error
    return terminal_chart(curves, config.train.epochs, terminal_width())


def terminal_chart(curves: Curves, epochs: float, width: int) -> str:
    """Each curve as filled columns of a character each, `width` characters wide in all."""
    return "\n\n".join(
        _schedule_rows(COLUMN_TITLES[name], points, epochs, max(20, width - _LEFT - 1))
        for name, points in curves.items()
    )


def _schedule_rows(title: str, points: list[tuple[float, float]], epochs: float, width: int) -> str:
    """The value at the middle of each column's stretch of epochs, in eighths of a row from zero."""
    heights, high = [], max(value for _, value in points) or 1.0
    position = 0
    for column in range(width):
        middle = (column + 0.5) * epochs / width
        while position + 1 < len(points) and points[position + 1][0] <= middle:
            position += 1
        heights.append(round(8 * _ROWS * points[position][1] / high))
    rows = [
        f"{_label(row, high):>{_LEFT - 2}} |{''.join(_EIGHTHS[min(8, max(0, h - 8 * row))] for h in heights)}"
        for row in reversed(range(_ROWS))
    ]
    axis = f"{'0':>{_LEFT - 2}} +{'-' * width}"
    scale = f"{'':{_LEFT}}0{f'{epochs:g} epochs':>{width - 1}}"
    return "\n".join([title, *rows, axis, scale])


def _label(row: int, high: float) -> str:
    """The value at the top of the highest and of the middle row."""
    return f"{high * (row + 1) / _ROWS:.4g}" if row + 1 in (_ROWS, _ROWS // 2) else ""
