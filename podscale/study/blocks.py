"""A study's results as blocks, from which the Markdown file and the page are made alike."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from podscale.evaluate.report.charts.dots import DotRow
from podscale.evaluate.report.charts.lines import LineSeries
from podscale.evaluate.report.charts.scale import round_outwards
from podscale.evaluate.report.figures import format_percent
from podscale.study.findings import ResultGroup, StudyResults
from podscale.study.statistics import mean_deviation, mean_deviation_percent, mean_difference
from podscale.text import format_count

COLOURS = 8
"""In the palette of reports; lines beyond it have them once more, dashed."""
MAX_BANDS = 4
"""Lines with bands in one chart, above which bands hide each other."""


@dataclass(frozen=True)
class TextBlock:
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class BulletBlock:
    """What is to be read first."""

    items: Sequence[str]


@dataclass(frozen=True)
class TableBlock:
    """Cells as text; all columns but the first `left` are numbers. folded: shown where asked for."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    left: int = 1
    folded: bool = False


@dataclass(frozen=True)
class ChartBlock:
    """A line chart; options: of charts.lines.line_drawing. name: of its file."""

    name: str
    title: str
    series: Sequence[LineSeries]
    y_unit: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DotBlock:
    """Dots in rows; options: of charts.dots.dots_drawing. name: of its file."""

    name: str
    title: str
    rows: Sequence[DotRow]
    unit: str
    options: dict[str, Any] = field(default_factory=dict)


ResultBlock = TextBlock | BulletBlock | TableBlock | ChartBlock | DotBlock


def result_blocks(found: StudyResults) -> Iterator[ResultBlock]:
    """Everything there is to show, first what matters most."""
    study = found.study
    if study.question:
        yield TextBlock(study.question.strip())
    if glance := list(summary_sentences(found)):
        yield BulletBlock(glance)
    yield from _chart_blocks(found)
    for x in found.xs:
        yield comparison_table(found, found.at(x), "" if x is None else f"{axis_name(found)} {format_axis_value(x)}")
    if found.numeric and len(found.lines) > 1:
        yield range_table(found)
    if any(arm.tried for arm in found.arms):
        yield learning_rate_table(found)
    if study.reading:
        yield TextBlock(study.reading.strip())
    yield _trial_table(found)


def summary_sentences(found: StudyResults) -> Iterator[str]:
    """A sentence for each thing that the figures decide."""
    if found.unfinished:
        yield f"Not finished: {format_count(found.unfinished, 'cell')} still to be run."
    last = [arm for arm in found.at(found.xs[-1]) if arm.top1s] if found.xs else []
    if len(last) > 1:
        best = max(last, key=lambda arm: statistics.fmean(arm.top1s))
        where = f" at {axis_name(found)} {format_axis_value(best.x)}" if best.x is not None else ""
        equal = [arm.line for arm in last if arm is not best and _noise_sentence(arm, best)]
        beside = f"; within noise of it: {', '.join(equal)}" if equal else ""
        yield f"Best{where}: {best.line}, {mean_deviation_percent(best.top1s)} (n = {len(best.top1s)}){beside}."
    if found.numeric:
        for line in found.lines:
            to = found.holds_to(line)
            if to is not None:
                held = (
                    f"keeps its accuracy to {axis_name(found)} {format_axis_value(to)}"
                    if to != found.xs[0]
                    else "loses from there"
                )
                yield f"{line}: {mean_deviation_percent(found.of(line)[0].top1s)} at {format_axis_value(found.xs[0])}, {held}."
    for line in found.lines:
        yield from _critical_text(found, line)


def _critical_text(found: StudyResults, line: str) -> Iterator[str]:
    critical = found.critical(line)
    if critical is None:
        return
    target = format_percent(found.study.target)
    if critical.batch is not None:
        said = (
            f"critical batch size {_round_two_digits(critical.batch)} (fit of S = S_min (1 + B_crit / B), relative error "
            f"{critical.error:.0%}); at least {_round_two_digits(critical.least_updates)} updates to {target}"
        )
    else:
        said = f"no critical batch size to {target}: {critical.reason}"
    measured = []
    if critical.linear_to is not None and critical.linear_to != found.xs[0]:
        measured.append(f"updates fall nearly in proportion up to batch {critical.linear_to:,}")
    if critical.useful_to is not None:
        measured.append(f"hardly at all beyond {critical.useful_to:,}")
    yield f"{line}: {said}{'; measured: ' + ', '.join(measured) if measured else ''}."


def _noise_sentence(arm: ResultGroup, best: ResultGroup) -> bool:
    found = mean_difference(best.top1s, arm.top1s)
    return found is not None and found.noise


def _chart_blocks(found: StudyResults) -> Iterator[ChartBlock | DotBlock]:
    looks = {line: _line_style(number) for number, line in enumerate(found.lines)}
    xs = [float(x) for x in found.xs] if found.numeric else []
    axis: dict[str, Any] = {"x_unit": axis_name(found), "x_ticks": xs, "log_x": bool(xs) and min(xs) > 0}
    by = f"by {axis_name(found)}"
    if found.numeric:
        lines = [_line_series(found, line, looks[line], lambda arm: arm.top1s, 100.0) for line in found.lines]
        if drawn := _drawable_lines(lines):
            options = {**axis, "y_range": _percent_range(drawn)}
            yield ChartBlock("accuracy", f"Last top-1 {by}", drawn, "top-1, %; bars: standard deviation", options)
    target = found.study.target
    if found.numeric and target is not None:
        for number, name in ((1, "epochs"), (0, "updates")):
            lines = [
                _line_series(found, line, looks[line], lambda arm, i=number: [r[i] for r in arm.reached(target)], 1.0)
                for line in found.lines
            ]
            if any(line.points for line in lines):
                marks = _critical_marks(found, looks)
                options = {**axis, "log": name == "updates", "x_marks": marks}
                unit = f"{name} to {format_percent(target)}{'; dashed: critical batch size' if marks else ''}"
                yield ChartBlock(
                    name, f"{name.capitalize()} to {format_percent(target)} {by}", _drawable_lines(lines), unit, options
                )
    last = found.at(found.xs[-1]) if found.xs else []
    if not found.numeric and len(last) > 1 and any(arm.top1s for arm in last):
        unit = "top-1, %; dots: seeds, bar: their mean, dashed: mean of the first"
        yield DotBlock(
            "accuracy", "Last top-1", [_dot_row(arm, looks[arm.line]) for arm in last], unit, {"x_range": (0, 100)}
        )
    curves = [(arm, curve) for arm in last if (curve := arm.curve())]
    if curves:
        where = f", {axis_name(found)} {format_axis_value(last[0].x)}" if last[0].x is not None else ""
        banded = len(curves) <= MAX_BANDS
        series = [
            LineSeries(
                arm.line,
                [(epoch, 100 * mean) for epoch, mean, _ in curve],
                spread=[100 * deviation for _, _, deviation in curve] if banded else (),
                **looks[arm.line],
            )
            for arm, curve in curves
        ]
        unit = "top-1, %; bands: standard deviation over the seeds" if banded else "top-1, %; mean over the seeds"
        yield ChartBlock("curves", f"Top-1 over the epochs{where}", series, unit, {"y_range": _percent_range(series)})


def _line_style(number: int) -> dict[str, Any]:
    """Of a line among several."""
    return {"colour": number % COLOURS + 1, "dashed": number // COLOURS % 2 == 1}


def _percent_range(lines: Sequence[LineSeries]) -> tuple[float, float]:
    """The vertical range of percentages, whose deviations may reach beyond what there is."""
    ends = [
        (y - deviation, y + deviation)
        for line in lines
        for (_, y), deviation in zip(line.points, line.spread or [0.0] * len(line.points), strict=True)
    ]
    low, high = round_outwards(max(0.0, min(a for a, _ in ends)), min(100.0, max(b for _, b in ends)))
    return low, min(100.0, high)


def _dot_row(arm: ResultGroup, look: dict[str, Any]) -> DotRow:
    note = mean_deviation_percent(arm.top1s) if arm.top1s else "diverged" if arm.diverged else "not run yet"
    return DotRow(arm.line, [100 * top1 for top1 in arm.top1s], look["colour"], note)


def _drawable_lines(lines: Sequence[LineSeries]) -> list[LineSeries]:
    return [line for line in lines if line.points]


def _line_series(found: StudyResults, line: str, look: dict[str, Any], values: Any, times: float) -> LineSeries:
    points = {float(arm.x): mean_deviation([times * v for v in values(arm)]) for arm in found.of(line) if values(arm)}
    ordered = sorted(points)
    means, spreads = [(x, points[x][0]) for x in ordered], [points[x][1] for x in ordered]
    return LineSeries(line, means, dots=True, spread=spreads, **look)


def _critical_marks(found: StudyResults, looks: dict[str, dict[str, Any]]) -> list[tuple[float, int]]:
    """The critical batches inside the measured range, or near it."""
    critical = {line: found.critical(line) for line in found.lines}
    return [
        (one.batch, looks[line]["colour"])
        for line, one in critical.items()
        if one is not None and one.batch is not None and found.xs[0] / 2 <= one.batch <= 2 * found.xs[-1]
    ]


def comparison_table(found: StudyResults, arms: Sequence[ResultGroup], caption: str) -> TableBlock:
    """One row an arm: its figures over the seeds, and its distance from the first arm."""
    target = found.study.target
    heads = ["", "rate", "updates", "n", "top-1, mean and deviation", "from the first", "training loss, nats"]
    if target is not None:
        heads[4:4] = [f"updates to {format_percent(target)}", "epochs"]
    rows = []
    for arm in arms:
        n = f"{len(arm.top1s)} of {arm.expected}" if len(arm.records) < arm.expected else str(len(arm.top1s))
        cells = [
            arm.line,
            f"{arm.rate:g}" if arm.rate is not None else "not chosen yet",
            f"{arm.updates:,}" if arm.updates is not None else "",
            n + (f" ({arm.diverged} diverged)" if arm.diverged else ""),
            mean_deviation_percent(arm.top1s) if arm.records else "",
            str(mean_difference(arms[0].top1s, arm.top1s) or "") if arm is not arms[0] else "",
            f"{arm.training_loss:.3f}" if arm.training_loss is not None else "",
        ]
        if target is not None:
            cells[4:4] = _steps_to_target_cell(arm, target)
        rows.append(cells)
    return TableBlock(heads, rows, caption)


def _steps_to_target_cell(arm: ResultGroup, target: float) -> list[str]:
    found = arm.reached(target)
    if not found:
        return ["never" if arm.records else "", ""]
    some = f" ({len(found)} of {len(arm.records)})" if len(found) < len(arm.records) else ""
    columns = [mean_deviation(column) for column in zip(*found, strict=True)]
    return [
        f"{columns[0][0]:,.0f} \u00b1 {columns[0][1]:,.0f}{some}",
        f"{columns[1][0]:.1f} \u00b1 {columns[1][1]:.1f}",
    ]


def range_table(found: StudyResults) -> TableBlock:
    """Each line over the whole horizontal axis, and its own change from one end to the other."""
    xs = found.xs
    rows = []
    for line in found.lines:
        by_x = {arm.x: arm.top1s for arm in found.of(line)}
        change = mean_difference(by_x.get(xs[0], []), by_x.get(xs[-1], []))
        rows.append([line, *(mean_deviation_percent(by_x.get(x, [])) for x in xs), str(change or "")])
    heads = ["", *map(format_axis_value, xs), f"from {format_axis_value(xs[0])} to {format_axis_value(xs[-1])}"]
    return TableBlock(heads, rows, f"Top-1 by {axis_name(found)}")


def learning_rate_table(found: StudyResults) -> TableBlock:
    """The learning rates tried, with the mean of each."""
    rows = []
    for arm in found.arms:
        cells = [_rate_cells(rate, records, best=rate == arm.rate) for rate, records in arm.tried.items()]
        if cells:
            rows.append([arm.chain.name, ", ".join(cells)])
    return TableBlock(["", "rate: top-1"], rows, "Learning rates tried (* chosen)", left=2)


def _rate_cells(rate: float, records: Sequence[Any], *, best: bool) -> str:
    done = [record.top1 for record in records if record.top1 is not None]
    shares = format_percent(statistics.fmean(done), 2) if len(done) == len(records) else "diverged"
    return f"{rate:g}{'*' if best else ''}: {shares}"


def _trial_table(found: StudyResults) -> TableBlock:
    """Every training behind the figures, and the code that ran it."""
    records = sorted(found.records, key=lambda record: record.cell)
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
        left=2,
        folded=True,
    )


def axis_name(found: StudyResults) -> str:
    """The option on the horizontal axis for people."""
    return (found.study.axis or "").rpartition(".")[2].removeprefix("global_").replace("_", " ")


def format_axis_value(x: Any) -> str:
    return f"{x:,}" if isinstance(x, int) and not isinstance(x, bool) else str(x)


def _round_two_digits(number: float) -> str:
    """Two significant digits are what such a fit can give."""
    return f"{float(f'{number:.2g}'):,.0f}"
