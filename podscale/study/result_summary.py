"""Summary of a study's results in sentences."""

import statistics
from collections.abc import Iterator
from typing import Any

from podscale.report.markup import format_percent
from podscale.study.document import BATCH_OPTION
from podscale.study.results import ResultGroup, StudyResults
from podscale.study.seed_statistics import mean_deviation_percent
from podscale.study.sweep_series import format_choice, format_option_value
from podscale.util.formatting import format_count


def summary_sentences(results: StudyResults) -> Iterator[str]:
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
