"""Training sections: curves of the run, and time by phase and stage."""

from typing import Any

from podscale.evaluation.history import finite_number
from podscale.report import charts, markup
from podscale.report.charts import LineSeries
from podscale.report.charts.lines import round_outwards
from podscale.report.markup import Markup, section_tag, tag
from podscale.report.report_data import STAGES, ReportData, describe_exit


def curves(data: ReportData) -> Markup | None:
    """Render loss, accuracy, learning rate and throughput over the run."""
    history, panels = data.history, []
    unit = (
        "epoch"
        if all(finite_number(line.get("epoch")) is not None for line in (*history.steps, *history.evaluations))
        else "step"
    )
    end = max((finite_number(line.get(unit)) or 0.0 for line in (*history.steps, *history.evaluations)), default=0.0)
    train_loss = _points_of(history.steps, unit, "loss")
    held_loss = _points_of(history.evaluations, unit, "loss")
    if train_loss or held_loss:
        lines = [LineSeries("training", train_loss, 1), LineSeries("validation", held_loss, 2, dots=True)]
        panels.append(charts.line_chart("Loss", lines, y_unit="nats", x_unit=unit, x_high=end, log=True))
    accuracy = [
        LineSeries(name, _points_of(history.evaluations, unit, key), colour, dots=True)
        for name, key, colour in (("top-1", "top1", 1), ("top-5", "top5", 3))
    ]
    if any(series.points for series in accuracy):
        goal = data.config.claim.top1 if data.config else None
        panels.append(
            charts.line_chart(
                "Validation accuracy",
                accuracy,
                x_unit=unit,
                show=lambda v: f"{100 * v:.4g}\u202f%",
                x_high=end,
                mark=goal,
                mark_name="claimed",
            )
        )
    for title, key, y_unit, colour in (
        ("Learning rate", "learning_rate", "", 4),
        ("Throughput", "images_per_second", "images/s", 3),
    ):
        points = _points_of(history.steps, unit, key)
        if points:
            span = round_outwards(0.0, max(value for _, value in points) or 1.0)  # rates compare from zero
            panels.append(
                charts.line_chart(
                    title, [LineSeries(title, points, colour)], y_unit=y_unit, x_unit=unit, x_high=end, y_range=span
                )
            )
    panels += _schedule_charts(data)
    return section_tag("Training", tag("div", panels, class_="grid2")) if panels else None


def _schedule_charts(data: ReportData) -> list[Markup]:
    """Draw momentum and weight decay over the run, if they change; the logged learning rate is shown above."""
    if data.config is None or data.shards is None:
        return []
    curves = charts.schedule_curves(data.config.train, len(data.shards.split("train")))
    return [charts.schedule_chart(name, points) for name, points in curves.items() if name != "learning_rate"]


def time_section(data: ReportData) -> Markup | None:
    """Render the time by phase of the training and by stage of the run."""
    phases = sorted(((n, s) for n, s in data.history.phases.items() if s > 0), key=lambda p: -p[1])
    panels = [charts.stacked_bar_chart("Training time by phase (rank 0)", phases)] if phases else []
    if stages := [data.outcomes[name] for name in STAGES if name in data.outcomes]:
        head = tag("tr", tag("th", "stage"), tag("th", "end"), tag("th", "time", class_="n"))
        rows = [
            tag(
                "tr",
                tag("td", outcome.stage),
                tag("td", describe_exit(outcome), class_="ok" if outcome.is_done else "failed"),
                tag("td", markup.format_seconds(outcome.seconds), class_="n"),
            )
            for outcome in stages
        ]
        table = tag("table", tag("thead", head), tag("tbody", rows), class_="compact")
        notes = [
            f"{data.history.count(event)} {words}"
            for event, words in (
                ("resumed", "times resumed"),
                ("checkpoint", "checkpoints"),
                ("skipped_update", "updates skipped as non-finite"),
                ("bad_record", "records that could not be decoded"),
            )
            if data.history.count(event)
        ]
        notes += _target_text(data)
        note = tag("p", ", ".join(notes), class_="note") if notes else None
        panels.append(tag("figure", tag("figcaption", tag("b", "Stages")), table, note, class_="panel"))
    return section_tag("Time", tag("div", panels, class_="grid2")) if panels else None


def _target_text(data: ReportData) -> list[str]:
    """Describe when the run reached its target accuracy."""
    reached = data.history.newest("target_reached")
    epoch, top1 = (finite_number(reached.get(name)) if reached else None for name in ("epoch", "top1"))
    return (
        []
        if epoch is None or top1 is None
        else [f"target reached at epoch {epoch:g} with {markup.format_percent(top1, 2)}"]
    )


def _points_of(lines: list[dict[str, Any]], x: str, y: str) -> list[tuple[float, float]]:
    pairs = ((finite_number(line.get(x)), finite_number(line.get(y))) for line in lines)
    return [(a, b) for a, b in pairs if a is not None and b is not None]
