"""Tables of a study's results."""

import statistics
from collections.abc import Sequence

from podscale.report.markup import format_percent
from podscale.study.blocks import TableBlock
from podscale.study.records import TrialRecord
from podscale.study.results import ResultGroup, StudyResults
from podscale.study.seed_statistics import mean_deviation, mean_deviation_percent, mean_difference
from podscale.study.sweep_series import format_choice, format_option_value


def comparison_table(
    results: StudyResults, groups: Sequence[ResultGroup], caption: str, *, by_axis: bool = False
) -> TableBlock:
    """Return the results of each group over the seeds, and its difference from the first group.

    Rows have the names of their lines, or, `by_axis`, of their points on the horizontal axis.
    """
    target = results.study.target
    heads = [
        "",
        "rate" if results.study.selection is None else "chosen",
        "steps",
        "n",
        "top-1, mean and deviation",
        "from the first",
        "training loss, nats",
    ]
    if target is not None:
        heads[4:4] = [f"steps to {format_percent(target)}", "epochs"]
    rows = []
    for group in groups:
        n = f"{len(group.top1s)} of {group.expected}" if len(group.records) < group.expected else str(len(group.top1s))
        cells = [
            results.axis_label(group.x) if by_axis else group.line,
            _chosen_text(group),
            f"{group.steps:,}" if group.steps is not None else "",
            n + (f" ({group.diverged} diverged)" if group.diverged else ""),
            mean_deviation_percent(group.top1s) if group.records else "",
            str(results.difference(groups[0], group) or "") if group is not groups[0] else "",
            f"{group.training_loss:.3f}" if group.training_loss is not None else "",
        ]
        if target is not None:
            cells[4:4] = _target_cells(group, target)
        rows.append(cells)
    return TableBlock(heads, rows, caption)


def _chosen_text(group: ResultGroup) -> str:
    """Return the learning rate of the trainings, or the options that a search has chosen for them."""
    if group.choice is None or group.rate is None:
        return "not chosen yet"
    is_searched = group.series.variant.search or group.series.variant.search_of
    return format_choice(group.choice) if is_searched else f"{group.rate:g}"


def _target_cells(group: ResultGroup, target: float) -> list[str]:
    reached = group.steps_to_target(target)
    if not reached:
        return ["never" if group.records else "", ""]
    n = f" ({len(reached)} of {len(group.records)})" if len(reached) < len(group.records) else ""
    steps, epochs = (mean_deviation(column) for column in zip(*reached, strict=True))
    return [f"{steps[0]:,.0f} \u00b1 {steps[1]:,.0f}{n}", f"{epochs[0]:.1f} \u00b1 {epochs[1]:.1f}"]


def range_table(results: StudyResults) -> TableBlock:
    """Return each line over the horizontal axis, with its change from one end to the other."""
    xs = results.xs
    rows = []
    for line in results.lines:
        by_x = {group.x: group.top1s for group in results.groups_of_line(line)}
        change = mean_difference(by_x.get(xs[0], []), by_x.get(xs[-1], []))
        rows.append([line, *(mean_deviation_percent(by_x.get(x, [])) for x in xs), str(change or "")])
    labels = [format_option_value(x) for x in xs]
    return TableBlock(["", *labels, f"from {labels[0]} to {labels[-1]}"], rows, f"Top-1 by {results.axis_name}")


def candidate_table(results: StudyResults) -> TableBlock:
    """Return the options tried, with the mean top-1 of each."""
    rows = [
        [group.series.name, format_choice(one) + (" *" if one == group.choice else ""), _mean_top1(records)]
        for group in results.groups
        for one, records in group.candidates
    ]
    images = "held-out training images" if results.study.selection is not None else "the reported images"
    caption = f"Options tried: {len(rows)} (* chosen)"
    return TableBlock(["", "options", f"top-1 on {images}"], rows, caption, text_columns=2, is_collapsed=True)


def _mean_top1(records: Sequence[TrialRecord]) -> str:
    top1s = [record.top1 for record in records if record.top1 is not None]
    return format_percent(statistics.fmean(top1s), 2) if len(top1s) == len(records) else "diverged"


def pretraining_table(results: StudyResults) -> TableBlock:
    """Return the trainings that variants start from, with their top-1 on their own validation images."""
    rows = []
    for name, records in results.pretraining.items():
        top1s = [record.top1 for record in records if record.top1 is not None]
        steps = max((record.updates for record in records), default=0)
        rows.append([name, f"{steps:,}", str(len(top1s)), mean_deviation_percent(top1s) if top1s else ""])
    heads = ["", "steps", "n", "top-1 on its own images, mean and deviation"]
    return TableBlock(heads, rows, "Pretraining, one for each seed of the results and of the selection")


def trial_table(results: StudyResults) -> TableBlock:
    """Return every training behind the results, with the code that ran it."""
    records = sorted(results.records, key=lambda record: record.cell)
    versions = sorted({record.code[:12] for record in records})
    code = "code" if len(versions) == 1 else "several versions of the code:"
    minutes = sum(record.cpu_seconds for record in records) / 60
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
    return TableBlock(
        ["trial", "settings", "seed", "steps", "top-1", "masked steps", "CPU seconds"],
        rows,
        f"Every training: {len(records)}, {minutes:.0f} CPU minutes"
        + (f" by {code} {', '.join(versions)}" if versions else ""),
        text_columns=2,
        is_collapsed=True,
    )
