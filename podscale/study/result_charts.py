"""Charts of a study's results: accuracy and steps to the target over the horizontal axis, top-1 over the epochs."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from podscale.report.charts.bars import PALETTE_SIZE
from podscale.report.charts.lines import LineSeries, ReferenceLine, XAxis, YAxis, round_outwards
from podscale.report.charts.standalone import DotRow
from podscale.report.markup import format_percent
from podscale.study.blocks import ChartBlock, DotBlock, LineBlock
from podscale.study.results import ResultGroup, StudyResults
from podscale.study.seed_statistics import mean_deviation, mean_deviation_percent

MAX_BANDS = 4
"""Most lines with bands in one chart; more bands would hide each other."""


def chart_blocks(results: StudyResults) -> Iterator[ChartBlock]:
    if results.has_numeric_axis:
        yield from _axis_charts(results)
    elif len(results.last_groups) > 1 and any(group.top1s for group in results.last_groups):
        unit = "top-1, %; dots: seeds, bar: their mean, dashed: mean of the first"
        rows = [_dot_row(results, group) for group in results.last_groups]
        yield DotBlock("accuracy", "Last top-1", rows, unit)
    curves = [(group, curve) for group in results.last_groups if (curve := group.curve())]
    if curves:
        yield _curve_chart(results, curves)


def _axis_charts(results: StudyResults) -> Iterator[ChartBlock]:
    """Yield charts of top-1, epochs and steps to the target over the horizontal axis."""
    xs, by = [float(x) for x in results.xs], f"by {results.axis_name}"
    axis = XAxis(results.axis_name, log=min(xs) > 0, ticks=xs)
    if lines := _lines(results, lambda group: [100 * top1 for top1 in group.top1s]):
        y = YAxis("top-1, %; bars: standard deviation", _percent_range(lines))
        yield LineBlock("accuracy", f"Last top-1 {by}", lines, y, axis)
    target = results.study.target
    if target is None:
        return
    marks = _critical_marks(results)
    epochs = _lines(results, lambda group: [epochs for _, epochs in group.steps_to_target(target)])
    steps = _lines(results, lambda group: [steps for steps, _ in group.steps_to_target(target)])
    for quantity, lines in (("epochs", epochs), ("steps", steps)):
        if lines:
            to_target = f"to {format_percent(target)}"
            y = YAxis(f"{quantity} {to_target}{'; dashed: critical batch size' if marks else ''}", log=lines is steps)
            yield LineBlock(quantity, f"{quantity.capitalize()} {to_target} {by}", lines, y, axis, marks)


def _curve_chart(
    results: StudyResults, curves: Sequence[tuple[ResultGroup, list[tuple[float, float, float]]]]
) -> ChartBlock:
    """Return a chart of each group's top-1 over the epochs."""
    x = curves[0][0].x
    has_bands = len(curves) <= MAX_BANDS
    lines = [
        LineSeries(
            group.line,
            [(epoch, 100 * mean) for epoch, mean, _ in curve],
            spread=[100 * deviation for _, _, deviation in curve] if has_bands else (),
            **_line_style(results, group.line),
        )
        for group, curve in curves
    ]
    title = f"Top-1 over the epochs{f', {results.axis_label(x)}' if x is not None else ''}"
    unit = "top-1, %; bands: standard deviation over the seeds" if has_bands else "top-1, %; mean over the seeds"
    return LineBlock("curves", title, lines, YAxis(unit, _percent_range(lines)))


def _lines(results: StudyResults, values: Callable[[ResultGroup], list[float]]) -> list[LineSeries]:
    """Return mean and deviation of the values over the horizontal axis, for each line that has any."""
    lines = []
    for line in results.lines:
        points = {float(group.x): mean_deviation(v) for group in results.groups_of_line(line) if (v := values(group))}
        if points:
            xs = sorted(points)
            spread = [points[x][1] for x in xs]
            means = [(x, points[x][0]) for x in xs]
            lines.append(LineSeries(line, means, dots=True, spread=spread, **_line_style(results, line)))
    return lines


def _line_style(results: StudyResults, line: str) -> dict[str, Any]:
    """Return the colour of a line; lines beyond the palette repeat it, dashed."""
    repeats, number = divmod(results.lines.index(line), PALETTE_SIZE)
    return {"colour": number + 1, "dashed": repeats % 2 == 1}


def _percent_range(lines: Sequence[LineSeries]) -> tuple[float, float]:
    """Return the range of the lines with their deviations, clipped to 0 to 100."""
    ends = [
        (y - deviation, y + deviation)
        for line in lines
        for (_, y), deviation in zip(line.points, line.spread or [0.0] * len(line.points), strict=True)
    ]
    low, high = round_outwards(max(0.0, min(a for a, _ in ends)), min(100.0, max(b for _, b in ends)))
    return low, min(100.0, high)


def _dot_row(results: StudyResults, group: ResultGroup) -> DotRow:
    note = mean_deviation_percent(group.top1s) if group.top1s else "diverged" if group.diverged else "not run yet"
    colour = _line_style(results, group.line)["colour"]
    return DotRow(group.line, [100 * top1 for top1 in group.top1s], colour, note)


def _critical_marks(results: StudyResults) -> list[ReferenceLine]:
    """Return the critical batches within a factor of 2 of the measured range."""
    critical = [(line, results.critical_batch(line)) for line in results.lines]
    return [
        ReferenceLine(fit.batch, colour=_line_style(results, line)["colour"])
        for line, fit in critical
        if fit is not None and fit.batch is not None and results.xs[0] / 2 <= fit.batch <= 2 * results.xs[-1]
    ]
