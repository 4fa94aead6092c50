"""Training sections: curves of the run, and time by phase and stage."""

from typing import Any

from podscale.evaluation.history import RunHistory, finite_number
from podscale.report import markup
from podscale.report.charts.bars import stacked_bar_chart
from podscale.report.charts.lines import LineSeries, ReferenceLine, XAxis, YAxis, line_chart, round_outwards
from podscale.report.charts.schedules import schedule_chart, schedule_curves
from podscale.report.markup import Markup, note, panel, section_tag, table, table_row, tag
from podscale.report.report_data import STAGES, ReportData, describe_exit

COUNTED_EVENTS = {
    "resumed": "times resumed",
    "checkpoint": "checkpoints",
    "skipped_update": "steps skipped as non-finite",
    "bad_record": "records that could not be decoded",
}


def curves(data: ReportData) -> Markup | None:
    history, panels = data.history, []
    axis = _x_axis(history)
    train_loss = _points_of(history.steps, axis.label, "loss")
    validation_loss = _points_of(history.evaluations, axis.label, "loss")
    if train_loss or validation_loss:
        lines = [LineSeries("training", train_loss, 1), LineSeries("validation", validation_loss, 2, dots=True)]
        panels.append(line_chart("Loss", lines, x=axis, y=YAxis("nats", log=True)))
    accuracy = [
        LineSeries(name, _points_of(history.evaluations, axis.label, key), colour, dots=True)
        for name, key, colour in (("top-1", "top1", 1), ("top-5", "top5", 3))
    ]
    if any(series.points for series in accuracy):
        target = data.config.claim.top1 if data.config else None
        claim = ReferenceLine(target, "claimed") if target is not None else None
        y = YAxis(format=lambda v: f"{100 * v:.4g}\u202f%")
        panels.append(line_chart("Validation accuracy", accuracy, x=axis, y=y, hline=claim))
    for title, key, unit, colour in (
        ("Learning rate", "learning_rate", "", 4),
        ("Throughput", "images_per_second", "images/s", 3),
    ):
        if points := _points_of(history.steps, axis.label, key):
            limits = round_outwards(0.0, max(value for _, value in points) or 1.0)  # rates compare from zero
            line = LineSeries(title, points, colour)
            panels.append(line_chart(title, [line], x=axis, y=YAxis(unit, limits)))
    panels += _schedule_charts(data)
    return section_tag("Training", tag("div", panels, class_="grid2")) if panels else None


def time_section(data: ReportData) -> Markup | None:
    """Render the time of the training by phase and of the run by stage."""
    phases = sorted(((n, s) for n, s in data.history.phases.items() if s > 0), key=lambda p: -p[1])
    panels = [stacked_bar_chart("Training time by phase (rank 0)", phases)] if phases else []
    if stages := [data.outcomes[name] for name in STAGES if name in data.outcomes]:
        rows = [
            tag(
                "tr",
                tag("td", outcome.stage),
                tag("td", describe_exit(outcome), class_="ok" if outcome.is_done else "failed"),
                tag("td", markup.format_seconds(outcome.seconds), class_="n"),
            )
            for outcome in stages
        ]
        counts = {words: data.history.count(event) for event, words in COUNTED_EVENTS.items()}
        remarks = [f"{count} {words}" for words, count in counts.items() if count] + _target_remarks(data.history)
        head = table_row("stage", "outcome", "time", cell="th", text_columns=2)
        panels.append(panel("Stages", table(head, rows), note(", ".join(remarks)) if remarks else None))
    return section_tag("Time", tag("div", panels, class_="grid2")) if panels else None


def _x_axis(history: RunHistory) -> XAxis:
    """Return an axis of epochs, or of steps if a record has no epoch, with the same end in all charts."""
    records = [*history.steps, *history.evaluations]
    unit = "epoch" if all(finite_number(record.get("epoch")) is not None for record in records) else "step"
    return XAxis(unit, high=max((finite_number(record.get(unit)) or 0.0 for record in records), default=0.0))


def _schedule_charts(data: ReportData) -> list[Markup]:
    """Draw the other columns of the schedule that change; the learning rate is drawn from the log."""
    if data.config is None or data.shards is None:
        return []
    curves = schedule_curves(data.config.train, len(data.shards.split("train")))
    return [schedule_chart(name, points) for name, points in curves.items() if name != "learning_rate"]


def _target_remarks(history: RunHistory) -> list[str]:
    event = history.newest("target_reached") or {}
    epoch, top1 = finite_number(event.get("epoch")), finite_number(event.get("top1"))
    if epoch is None or top1 is None:
        return []
    return [f"target reached at epoch {epoch:g} with {markup.format_percent(top1, 2)}"]


def _points_of(records: list[dict[str, Any]], x: str, y: str) -> list[tuple[float, float]]:
    pairs = ((finite_number(record.get(x)), finite_number(record.get(y))) for record in records)
    return [(a, b) for a, b in pairs if a is not None and b is not None]
