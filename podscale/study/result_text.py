"""Sentences and tables of a study's results page: the verdict, the summary, and the numbers behind them."""

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from podscale.report.markup import format_percent
from podscale.study.blocks import TableBlock
from podscale.study.document import BATCH_OPTION
from podscale.study.records import TrialRecord
from podscale.study.results import ResultGroup, StudyResults
from podscale.study.seed_statistics import mean_deviation, mean_deviation_percent, mean_difference
from podscale.study.sweep_series import format_choice, format_option_value
from podscale.study.verdict import CriterionVerdict, StudyVerdict, curve_distances
from podscale.util.formatting import format_count


def verdict_text(verdict: StudyVerdict) -> str:
    """Return the verdict in words."""
    return f"Verdict: {verdict.verdict.replace('-', ' ')}. {verdict.sentence}"


def summary_sentences(results: StudyResults) -> Iterator[str]:
    """Yield sentences on the trials left, the best line, its lead, critical batch sizes, and choices at an edge."""
    if results.unfinished_trials:
        yield f"Not finished: {format_count(results.unfinished_trials, 'trial')} left to run."
    last = [group for group in results.last_groups if group.top1s]
    if len(last) > 1:
        best = max(last, key=lambda group: statistics.fmean(group.top1s))
        at = f" at {results.axis_label(best.x)}" if best.x is not None else ""
        equal = [group.line for group in last if group is not best and _is_noise(results, group, best)]
        noise = f"; within noise of it: {', '.join(equal)}" if equal else ""
        yield f"Best{at}: {best.line}, {mean_deviation_percent(best.top1s)} (n = {len(best.top1s)}){noise}."
    if results.has_numeric_axis:
        for line in results.lines:
            if (end := results.holds_up_to(line)) is not None:
                yield _axis_sentence(results, line, end)
    for line in results.lines:
        yield from _critical_batch_sentence(results, line)
    for group in results.groups:
        yield from _edge_sentences(group)


def _axis_sentence(results: StudyResults, line: str, end: Any) -> str:
    """Return the accuracy of a line at the first x, and up to which batch it holds.

    If it is higher at the last x, or if the axis is no batch, the accuracy there follows instead.
    """
    first, *_, last = results.groups_of_line(line)
    change = results.difference(first, last)
    is_higher = change is not None and change.value > 0 and not change.is_noise
    if change is not None and (is_higher or results.study.axis_option != BATCH_OPTION):
        noise = ", within noise" if change.is_noise else ""
        rest = f"{mean_deviation_percent(last.top1s)} at {format_option_value(last.x)}{noise}"
    elif end != first.x:
        rest = f"keeps its accuracy to {results.axis_label(end)}"
    else:
        rest = "loses accuracy beyond it"
    return f"{line}: {mean_deviation_percent(first.top1s)} at {format_option_value(first.x)}, {rest}."


def _edge_sentences(group: ResultGroup) -> Iterator[str]:
    """Yield a warning for each option whose chosen value is the smallest or the largest of those searched."""
    for option, values in group.series.variant.search.items():
        is_ordered = len(values) > 2 and all(isinstance(one, int | float) for one in values)
        if group.choice is None or not is_ordered or group.choice[option] not in (min(values), max(values)):
            continue
        end = "largest" if group.choice[option] == max(values) else "smallest"
        value = format_choice({option: group.choice[option]})
        yield f"{group.series.name}: {value} is the {end} value searched; a better one may lie beyond it."


def _critical_batch_sentence(results: StudyResults, line: str) -> Iterator[str]:
    critical = results.critical_batch(line)
    if critical is None:
        return
    target = format_percent(results.study.target)
    if critical.batch is not None:
        batch, steps = (f"{float(f'{number:.2g}'):,.0f}" for number in (critical.batch, critical.least_steps))
        summary = (
            f"critical batch size {batch} (fit of S = S_min (1 + B_crit / B), relative error {critical.error:.0%}); "
            f"at least {steps} steps to {target}"
        )
    else:
        summary = f"no critical batch size to {target}: {critical.reason}"
    measured = []
    if critical.linear_to is not None and critical.linear_to != results.xs[0]:
        measured.append(f"steps fall nearly in proportion up to batch {critical.linear_to:,}")
    if critical.useful_to is not None:
        measured.append(f"hardly at all beyond {critical.useful_to:,}")
    yield f"{line}: {summary}{'; measured: ' + ', '.join(measured) if measured else ''}."


def _is_noise(results: StudyResults, group: ResultGroup, best: ResultGroup) -> bool:
    difference = results.difference(best, group)
    return difference is not None and difference.is_noise


def criteria_table(verdict: StudyVerdict) -> TableBlock:
    """Return the criteria with their results."""
    heads = ["criterion", "passes if", "variant", "against", "result", "n", "verdict"]
    rows = [_criterion_row(result) for result in verdict.criteria]
    return TableBlock(heads, rows, "Criteria, written before the run", text_columns=4)


def _criterion_row(result: CriterionVerdict) -> list[str]:
    name = f"{result.name} (premise)" if result.premise else result.name
    verdict = result.verdict.replace("-", " ")
    return [name, result.criterion, result.variant, result.other, _value_text(result), str(result.n), verdict]


def _value_text(result: CriterionVerdict) -> str:
    if result.value is None:
        return ""
    scale, unit = (100, " points") if result.measure == "top1" else (1, "")
    sign = "+" if result.measure == "top1" else ""
    interval = "" if result.half_width is None else f" \u00b1 {scale * result.half_width:.2f}"
    return f"{scale * result.value:{sign}.2f}{interval}{unit}"


def comparison_table(
    results: StudyResults, groups: Sequence[ResultGroup], caption: str, *, by_axis: bool = False
) -> TableBlock:
    """Return the results of each group over the seeds, and its difference from the first group.

    Rows have the names of their lines, or, `by_axis`, of their points on the horizontal axis. If a group has ensembles,
    the table has a column with the top-1 of their members.
    """
    target = results.study.target
    has_members = any(group.member_top1s for group in groups)
    heads = [
        "",
        "rate" if results.study.selection is None else "chosen",
        "steps",
        "n",
        *([f"steps to {format_percent(target)}", "epochs"] if target is not None else []),
        "top-1, mean and deviation",
        *(["top-1 of a member"] if has_members else []),
        "from the first",
        "training loss, nats",
    ]
    rows = []
    for group in groups:
        n = f"{len(group.top1s)} of {group.expected}" if len(group.records) < group.expected else str(len(group.top1s))
        rows.append(
            [
                results.axis_label(group.x) if by_axis else group.line,
                _chosen_text(group),
                f"{group.steps:,}" if group.steps is not None else "",
                n + (f" ({group.diverged} diverged)" if group.diverged else ""),
                *(_target_cells(group, target) if target is not None else []),
                mean_deviation_percent(group.top1s) if group.records else "",
                *([_member_text(group)] if has_members else []),
                str(results.difference(groups[0], group) or "") if group is not groups[0] else "",
                f"{group.training_loss:.3f}" if group.training_loss is not None else "",
            ]
        )
    return TableBlock(heads, rows, caption)


def _member_text(group: ResultGroup) -> str:
    """Return mean and deviation over the ensembles of their members' mean top-1; "" if no record has members."""
    values = group.member_top1s
    n = f" ({len(values)} of {len(group.top1s)})" if len(values) < len(group.top1s) else ""
    return f"{mean_deviation_percent(values)}{n}" if values else ""


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


def parting_table(results: StudyResults, verdict: StudyVerdict) -> TableBlock | None:
    """Return the distance of paired curves at each evaluation, for the criteria by which both sides are equal.

    A distance is the mean over the seeds of the absolute difference of top-1, in points. Returns None without curves.
    """
    curves = {
        f"{result.variant} and {result.other}": distances
        for criterion, result in zip(results.study.criteria, verdict.criteria, strict=True)
        if criterion.equal is not None and (distances := curve_distances(results, criterion))
    }
    if not curves:
        return None
    epochs = sorted(set.intersection(*map(set, curves.values())))
    rows = [[f"{epoch:.1f}", *(f"{100 * distances[epoch]:.2f}" for distances in curves.values())] for epoch in epochs]
    caption = "Distance of the curves of a seed: mean of the absolute difference of top-1, points"
    return TableBlock(["epoch", *curves], rows, caption, is_collapsed=True)


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
        f"Every training: {len(records)}, {_cpu_minutes_text(records)}"
        + (f" by {code} {', '.join(versions)}" if versions else ""),
        text_columns=2,
        is_collapsed=True,
    )


def _cpu_minutes_text(records: Sequence[TrialRecord]) -> str:
    """Return the CPU minutes of the trainings whose cost is known, and how many others there are."""
    minutes = sum(record.cpu_seconds for record in records) / 60
    unknown = sum(not record.cpu_seconds for record in records)
    text = f"{minutes:.0f} CPU minutes"
    return f"{text} ({unknown} of several launches not counted)" if unknown else text
