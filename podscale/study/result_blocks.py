"""Blocks of a study's results: text, tables and charts for both the Markdown file and the page."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from podscale.report.charts.lines import DEFAULT_X, LineSeries, ReferenceLine, XAxis, YAxis, round_outwards
from podscale.report.charts.standalone import DotRow
from podscale.report.markup import format_percent
from podscale.study.results import ResultGroup, StudyResults, mean_deviation, mean_deviation_percent, mean_difference
from podscale.util.formatting import format_count

COLOURS = 8
"""Number of colours in the report's palette; further lines repeat them, dashed."""
MAX_BANDS = 4
"""Largest number of lines drawn with bands in one chart; more bands would hide each other."""


@dataclass(frozen=True)
class TextBlock:
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class BulletBlock:
    """A bullet list, such as the summary at the top."""

    items: Sequence[str]


@dataclass(frozen=True)
class TableBlock:
    """A table of text cells.

    Args:
        text_columns: number of leading columns that hold text; the others hold numbers.
        is_collapsed: shown on demand only.
    """

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    text_columns: int = 1
    is_collapsed: bool = False


@dataclass(frozen=True)
class ChartBlock:
    """A line chart.

    Args:
        name: suffix of its file name.
    """

    name: str
    title: str
    series: Sequence[LineSeries]
    y: YAxis
    x: XAxis = DEFAULT_X
    vlines: Sequence[ReferenceLine] = ()


@dataclass(frozen=True)
class DotBlock:
    """A dot chart with one row per group.

    Args:
        name: suffix of its file name.
        x_range: limits of the axis.
    """

    name: str
    title: str
    rows: Sequence[DotRow]
    unit: str
    x_range: tuple[float, float] | None = None


ResultBlock = TextBlock | BulletBlock | TableBlock | ChartBlock | DotBlock


def result_blocks(results: StudyResults) -> Iterator[ResultBlock]:
    """Yield all blocks, the most important first."""
    study = results.study
    if study.question:
        yield TextBlock(study.question.strip())
    if glance := list(summary_sentences(results)):
        yield BulletBlock(glance)
    yield from _chart_blocks(results)
    for x in results.xs:
        yield comparison_table(
            results, results.groups_at(x), "" if x is None else f"{axis_name(results)} {format_axis_value(x)}"
        )
    if results.has_numeric_axis and len(results.lines) > 1:
        yield range_table(results)
    if any(group.sweep_records for group in results.groups):
        yield learning_rate_table(results)
    if study.reading:
        yield TextBlock(study.reading.strip())
    yield _trial_table(results)


def summary_sentences(results: StudyResults) -> Iterator[str]:
    """Yield one sentence per finding."""
    if results.unfinished_trials:
        yield f"Not finished: {format_count(results.unfinished_trials, 'cell')} still to be run."
    last = [group for group in results.groups_at(results.xs[-1]) if group.top1s] if results.xs else []
    if len(last) > 1:
        best = max(last, key=lambda group: statistics.fmean(group.top1s))
        where = f" at {axis_name(results)} {format_axis_value(best.x)}" if best.x is not None else ""
        equal = [group.line for group in last if group is not best and _noise_sentence(group, best)]
        beside = f"; within noise of it: {', '.join(equal)}" if equal else ""
        yield f"Best{where}: {best.line}, {mean_deviation_percent(best.top1s)} (n = {len(best.top1s)}){beside}."
    if results.has_numeric_axis:
        for line in results.lines:
            to = results.holds_up_to(line)
            if to is not None:
                held = (
                    f"keeps its accuracy to {axis_name(results)} {format_axis_value(to)}"
                    if to != results.xs[0]
                    else "loses from there"
                )
                first = mean_deviation_percent(results.groups_of_line(line)[0].top1s)
                yield f"{line}: {first} at {format_axis_value(results.xs[0])}, {held}."
    for line in results.lines:
        yield from _critical_text(results, line)


def _critical_text(results: StudyResults, line: str) -> Iterator[str]:
    critical = results.critical_batch(line)
    if critical is None:
        return
    target = format_percent(results.study.target)
    if critical.batch is not None:
        summary = (
            f"critical batch size {_round_two_digits(critical.batch)} (fit of S = S_min (1 + B_crit / B), "
            f"relative error {critical.error:.0%}); "
            f"at least {_round_two_digits(critical.least_updates)} updates to {target}"
        )
    else:
        summary = f"no critical batch size to {target}: {critical.reason}"
    measured = []
    if critical.linear_to is not None and critical.linear_to != results.xs[0]:
        measured.append(f"updates fall nearly in proportion up to batch {critical.linear_to:,}")
    if critical.useful_to is not None:
        measured.append(f"hardly at all beyond {critical.useful_to:,}")
    yield f"{line}: {summary}{'; measured: ' + ', '.join(measured) if measured else ''}."


def _noise_sentence(group: ResultGroup, best: ResultGroup) -> bool:
    found = mean_difference(best.top1s, group.top1s)
    return found is not None and found.is_noise


def _chart_blocks(results: StudyResults) -> Iterator[ChartBlock | DotBlock]:
    styles = {line: _line_style(number) for number, line in enumerate(results.lines)}
    xs = [float(x) for x in results.xs] if results.has_numeric_axis else []
    axis = XAxis(axis_name(results), log=bool(xs) and min(xs) > 0, ticks=xs)
    by = f"by {axis_name(results)}"
    if results.has_numeric_axis:
        lines = [_line_series(results, line, styles[line], lambda group: group.top1s, 100.0) for line in results.lines]
        if drawn := _drawable_lines(lines):
            y = YAxis("top-1, %; bars: standard deviation", _percent_range(drawn))
            yield ChartBlock("accuracy", f"Last top-1 {by}", drawn, y, axis)
    target = results.study.target
    if results.has_numeric_axis and target is not None:
        for number, name in ((1, "epochs"), (0, "updates")):
            lines = [
                _line_series(
                    results,
                    line,
                    styles[line],
                    lambda group, i=number: [r[i] for r in group.steps_to_target(target)],
                    1.0,
                )
                for line in results.lines
            ]
            if any(line.points for line in lines):
                marks = _critical_marks(results, styles)
                unit = f"{name} to {format_percent(target)}{'; dashed: critical batch size' if marks else ''}"
                title, y = f"{name.capitalize()} to {format_percent(target)} {by}", YAxis(unit, log=name == "updates")
                yield ChartBlock(name, title, _drawable_lines(lines), y, axis, marks)
    last = results.groups_at(results.xs[-1]) if results.xs else []
    if not results.has_numeric_axis and len(last) > 1 and any(group.top1s for group in last):
        unit = "top-1, %; dots: seeds, bar: their mean, dashed: mean of the first"
        yield DotBlock(
            "accuracy",
            "Last top-1",
            [_dot_row(group, styles[group.line]) for group in last],
            unit,
            (0, 100),
        )
    curves = [(group, curve) for group in last if (curve := group.curve())]
    if curves:
        where = f", {axis_name(results)} {format_axis_value(last[0].x)}" if last[0].x is not None else ""
        banded = len(curves) <= MAX_BANDS
        series = [
            LineSeries(
                group.line,
                [(epoch, 100 * mean) for epoch, mean, _ in curve],
                spread=[100 * deviation for _, _, deviation in curve] if banded else (),
                **styles[group.line],
            )
            for group, curve in curves
        ]
        unit = "top-1, %; bands: standard deviation over the seeds" if banded else "top-1, %; mean over the seeds"
        yield ChartBlock("curves", f"Top-1 over the epochs{where}", series, YAxis(unit, _percent_range(series)))


def _line_style(number: int) -> dict[str, Any]:
    """Return colour and dash of the line with this number."""
    return {"colour": number % COLOURS + 1, "dashed": number // COLOURS % 2 == 1}


def _percent_range(lines: Sequence[LineSeries]) -> tuple[float, float]:
    """Return the vertical range of percentages with their deviations, clipped to 0 to 100."""
    ends = [
        (y - deviation, y + deviation)
        for line in lines
        for (_, y), deviation in zip(line.points, line.spread or [0.0] * len(line.points), strict=True)
    ]
    low, high = round_outwards(max(0.0, min(a for a, _ in ends)), min(100.0, max(b for _, b in ends)))
    return low, min(100.0, high)


def _dot_row(group: ResultGroup, style: dict[str, Any]) -> DotRow:
    note = mean_deviation_percent(group.top1s) if group.top1s else "diverged" if group.diverged else "not run yet"
    return DotRow(group.line, [100 * top1 for top1 in group.top1s], style["colour"], note)


def _drawable_lines(lines: Sequence[LineSeries]) -> list[LineSeries]:
    return [line for line in lines if line.points]


def _line_series(results: StudyResults, line: str, style: dict[str, Any], values: Any, times: float) -> LineSeries:
    points = {
        float(group.x): mean_deviation([times * v for v in values(group)])
        for group in results.groups_of_line(line)
        if values(group)
    }
    ordered = sorted(points)
    means, spreads = [(x, points[x][0]) for x in ordered], [points[x][1] for x in ordered]
    return LineSeries(line, means, dots=True, spread=spreads, **style)


def _critical_marks(results: StudyResults, styles: dict[str, dict[str, Any]]) -> list[ReferenceLine]:
    """Return the critical batches within a factor of 2 of the measured range."""
    critical = {line: results.critical_batch(line) for line in results.lines}
    return [
        ReferenceLine(one.batch, colour=styles[line]["colour"])
        for line, one in critical.items()
        if one is not None and one.batch is not None and results.xs[0] / 2 <= one.batch <= 2 * results.xs[-1]
    ]


def comparison_table(results: StudyResults, groups: Sequence[ResultGroup], caption: str) -> TableBlock:
    """Return a table with one row per group: its figures over the seeds, and its difference from the first group."""
    target = results.study.target
    heads = ["", "rate", "updates", "n", "top-1, mean and deviation", "from the first", "training loss, nats"]
    if target is not None:
        heads[4:4] = [f"updates to {format_percent(target)}", "epochs"]
    rows = []
    for group in groups:
        n = f"{len(group.top1s)} of {group.expected}" if len(group.records) < group.expected else str(len(group.top1s))
        cells = [
            group.line,
            f"{group.rate:g}" if group.rate is not None else "not chosen yet",
            f"{group.updates:,}" if group.updates is not None else "",
            n + (f" ({group.diverged} diverged)" if group.diverged else ""),
            mean_deviation_percent(group.top1s) if group.records else "",
            str(mean_difference(groups[0].top1s, group.top1s) or "") if group is not groups[0] else "",
            f"{group.training_loss:.3f}" if group.training_loss is not None else "",
        ]
        if target is not None:
            cells[4:4] = _steps_to_target_cell(group, target)
        rows.append(cells)
    return TableBlock(heads, rows, caption)


def _steps_to_target_cell(group: ResultGroup, target: float) -> list[str]:
    found = group.steps_to_target(target)
    if not found:
        return ["never" if group.records else "", ""]
    some = f" ({len(found)} of {len(group.records)})" if len(found) < len(group.records) else ""
    columns = [mean_deviation(column) for column in zip(*found, strict=True)]
    return [
        f"{columns[0][0]:,.0f} \u00b1 {columns[0][1]:,.0f}{some}",
        f"{columns[1][0]:.1f} \u00b1 {columns[1][1]:.1f}",
    ]


def range_table(results: StudyResults) -> TableBlock:
    """Return a table of each line over the horizontal axis, with its change from one end to the other."""
    xs = results.xs
    rows = []
    for line in results.lines:
        by_x = {group.x: group.top1s for group in results.groups_of_line(line)}
        change = mean_difference(by_x.get(xs[0], []), by_x.get(xs[-1], []))
        rows.append([line, *(mean_deviation_percent(by_x.get(x, [])) for x in xs), str(change or "")])
    heads = ["", *map(format_axis_value, xs), f"from {format_axis_value(xs[0])} to {format_axis_value(xs[-1])}"]
    return TableBlock(heads, rows, f"Top-1 by {axis_name(results)}")


def learning_rate_table(results: StudyResults) -> TableBlock:
    """Return a table of the learning rates tried, with the mean top-1 of each."""
    rows = []
    for group in results.groups:
        cells = [_rate_cells(rate, records, best=rate == group.rate) for rate, records in group.sweep_records.items()]
        if cells:
            rows.append([group.series.name, ", ".join(cells)])
    return TableBlock(["", "rate: top-1"], rows, "Learning rates tried (* chosen)", text_columns=2)


def _rate_cells(rate: float, records: Sequence[Any], *, best: bool) -> str:
    done = [record.top1 for record in records if record.top1 is not None]
    shares = format_percent(statistics.fmean(done), 2) if len(done) == len(records) else "diverged"
    return f"{rate:g}{'*' if best else ''}: {shares}"


def _trial_table(results: StudyResults) -> TableBlock:
    """Return a table of every training behind the results, and the code that ran it."""
    records = sorted(results.records, key=lambda record: record.cell)
    codes = sorted({record.code[:12] for record in records})
    cpu = sum(record.cpu_seconds for record in records)
    rows = [
        [
            record.cell,
            ", ".join(f"{name.rpartition('.')[2]} {value}" for name, value in record.settings.items()),
            str(record.seed),
            f"{record.updates:,}",
            format_percent(record.top1, 2) if record.top1 is not None else record.ended,
            str(record.masked),
            f"{record.cpu_seconds:.0f}" if record.cpu_seconds else "several launches",
        ]
        for record in records
    ]
    made = f" by {'code' if len(codes) == 1 else 'several versions of the code:'} {', '.join(codes)}" if codes else ""
    return TableBlock(
        ["cell", "settings", "seed", "updates", "top-1", "masked updates", "CPU seconds"],
        rows,
        f"Every training: {len(records)}, {cpu / 60:.0f} CPU minutes{made}",
        text_columns=2,
        is_collapsed=True,
    )


def axis_name(results: StudyResults) -> str:
    """Return the display name of the option on the horizontal axis."""
    return (results.study.axis_option or "").rpartition(".")[2].removeprefix("global_").replace("_", " ")


def format_axis_value(x: Any) -> str:
    return f"{x:,}" if isinstance(x, int) and not isinstance(x, bool) else str(x)


def _round_two_digits(number: float) -> str:
    """Format with two significant digits, the precision of the fit."""
    return f"{float(f'{number:.2g}'):,.0f}"
