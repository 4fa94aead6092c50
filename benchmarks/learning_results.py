"""What the records of the learning proof say: tables, plots and the text between them."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence

from conditions import RESULTS, publish
from learning_parts import PARTS, SEED_OF_SWEEPS, Arm, Groups, Part, Sweep
from learning_text import QUESTIONS, READING, SETTING
from plots import Line, write_plot
from trials import Record, Records, Trial

Point = tuple[float, float, float]

T_95 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26, 10: 2.23}
"""Two-sided 95 % quantiles of Student's t by degrees of freedom."""


def write_results(head: Sequence[str], found: Mapping[str, Records]) -> None:
    """Writes learning.md and its plots from the records of each part."""
    lines = [*head, *SETTING]
    for name, records in found.items():
        lines += part_lines(name, PARTS[name], records)
    for name, records in found.items():
        lines += all_runs(name, PARTS[name], records)
    publish(RESULTS / "learning.md", lines)


def part_lines(name: str, part: Part, records: Records) -> list[str]:
    """One part as Markdown, with its plots: its sweeps, its comparisons, how to read it."""
    lines = [f"## ({name}) {part.title}", "", QUESTIONS[name], ""]
    if part.sweeps:
        lines += sweep_table(part.sweeps, records)
    groups = part.groups(records.get)
    for group, arms in groups.items():
        lines += [*([f"{group}:", ""] if group else []), *comparison(arms, records), ""]
    for plot in plots(name, part, groups, records):
        lines += [f"![{part.title}]({plot})", ""]
    return [*lines, READING[name], ""]


def plots(name: str, part: Part, groups: Groups, records: Records) -> Iterator[str]:
    """Draws what there is to draw: all arms over x, and the curves of the last comparison; names of the files."""
    points: dict[str, list[Point]] = {}
    for arm in (arm for arms in groups.values() for arm in arms):
        for line in arm.lines if top1s(arm, records) else ():
            points.setdefault(line, []).append((arm.x, *in_percent(top1s(arm, records))))
    if points:
        lines = [Line(line, sorted(found)) for line, found in points.items()]
        write_plot(
            RESULTS / f"learning-{name}.svg",
            part.title,
            lines,
            x_name=part.x_name,
            y_name="top-1, %",
            log_x=True,
            x_ticks=sorted({x for found in points.values() for x, _, _ in found}),
        )
        yield f"learning-{name}.svg"
    group, arms = list(groups.items())[-1] if groups else ("", [])
    curves = [Line(arm.name, curve(arm, records)) for arm in arms]
    if any(line.points for line in curves):  # before its first training, a part has nothing to draw
        title = f"{part.title}{f', {group[0].lower()}{group[1:]}' if group else ''}"
        write_plot(RESULTS / f"learning-{name}-curves.svg", title, curves, x_name="epoch", y_name="top-1, %")
        yield f"learning-{name}-curves.svg"


def curve(arm: Arm, records: Records) -> list[Point]:
    """Mean and deviation of top-1 in percent over the trainings of an arm, by epoch."""
    found = [record.curve for trial in arm.trials if (record := records.get(trial)) is not None and record.top1]
    columns = zip(*found, strict=True)
    return [(column[0][0], *in_percent([top1 for _, top1 in column])) for column in columns]


def in_percent(shares: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation (0 of a single one)."""
    return 100 * statistics.fmean(shares), 100 * statistics.stdev(shares) if len(shares) > 1 else 0.0


def comparison(arms: Sequence[Arm], records: Records) -> list[str]:
    """One row an arm: accuracy over the seeds, and its distance from the first arm."""
    first = top1s(arms[0], records) if arms else []
    lines = [
        "| | updates | n | top-1, mean and deviation | from the first | training loss, nats |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for i, arm in enumerate(arms):
        found = [record for trial in arm.trials if (record := records.get(trial)) is not None]
        done = [record for record in found if record.top1 is not None]
        losses = [record.training_loss for record in done if record.training_loss is not None]
        values = [record.top1 for record in done if record.top1 is not None]
        cells = [
            arm.name,
            f"{done[0].updates:,}" if done else "",
            f"{len(done)}" + (f" ({len(found) - len(done)} diverged)" if len(found) > len(done) else ""),
            spread(values),
            difference(first, values) if i else "",
            f"{statistics.fmean(losses):.3f}" if losses else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def top1s(arm: Arm, records: Records) -> list[float]:
    """Accuracies of an arm's trainings that ended well."""
    found = [records.get(trial) for trial in arm.trials]
    return [record.top1 for record in found if record is not None and record.top1 is not None]


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation of shares, in percent."""
    if not values:
        return "none"
    deviation = f" \u00b1 {100 * statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{100 * statistics.fmean(values):.2f}{deviation} %"


def difference(first: Sequence[float], values: Sequence[float]) -> str:
    """Difference of the means in points, with its 95 % interval (Student's t, pooled variance)."""
    if not first or not values:
        return ""
    points = 100 * (statistics.fmean(values) - statistics.fmean(first))
    free = len(first) + len(values) - 2
    if min(len(first), len(values)) < 2:
        return f"{points:+.2f}"
    squares = sum((v - statistics.fmean(group)) ** 2 for group in (first, values) for v in group)
    error = math.sqrt(squares / free * (1 / len(first) + 1 / len(values)))
    half = 100 * T_95[free] * error
    return f"{points:+.2f} \u00b1 {half:.2f}{'' if abs(points) > half else ' (within noise)'}"


def sweep_table(sweeps: Sequence[Sweep], records: Records) -> list[str]:
    """The learning rates tried for each optimizer and batch, with one seed."""
    lines = [
        f"Learning rates tried, with the top-1 of each at seed {SEED_OF_SWEEPS}:",
        "",
        "| batch | optimizer | rate: top-1 |",
        "|---:|---|---|",
    ]
    for sweep in sweeps:
        tried = {rate: records.get(trial) for rate, trial in sweep.trials(records.get).items()}
        best = sweep.best(records.get)
        cells = [_tried(rate, record, best=rate == best) for rate, record in tried.items() if record is not None]
        lines.append(f"| {sweep.batch:,} | {sweep.optimizer.upper()} | {', '.join(cells)} |")
    return [*lines, ""]


def _tried(rate: float, record: Record, *, best: bool) -> str:
    text = f"{rate:g}: " + (f"{record.top1:.2%}" if record.top1 is not None else "diverged")
    return f"**{text}**" if best else text


def all_runs(name: str, part: Part, records: Records) -> list[str]:
    """Every training of a part, and the code that ran it."""
    found = [(label, record) for label, trial in named_trials(part, records) if (record := records.get(trial))]
    if not found:
        return []
    commits = sorted({record.commit[:12] for _, record in found})
    rows = [
        f"| {label} | {record.seed} | {record.updates:,} | "
        f"{f'{record.top1:.2%}' if record.top1 is not None else 'diverged'} | {record.masked} | "
        f"{f'{record.cpu_seconds:.0f}' if record.cpu_seconds else 'in several launches'} |"
        for label, record in found
    ]
    return [
        "<details>",
        f"<summary>({name}) every training: {len(found)}, with podscale/ at git tree {records.code[:12]} "
        f"({'commit' if len(commits) == 1 else 'commits'} {', '.join(commits)})</summary>",
        "",
        "| training | seed | updates | top-1 | masked updates | CPU seconds |",
        "|---|---:|---:|---:|---:|---:|",
        *rows,
        "",
        "</details>",
        "",
    ]


def named_trials(part: Part, records: Records) -> list[tuple[str, Trial]]:
    """The trials of a part with names for people; one that is in the sweep and in an arm goes by the former."""
    named: dict[str, tuple[str, Trial]] = {}
    for sweep in part.sweeps:
        for rate, trial in sweep.trials(records.get).items():
            named[trial.key] = f"sweep: batch {sweep.batch:,}, {sweep.optimizer.upper()}, rate {rate:g}", trial
    for group, arms in part.groups(records.get).items():
        for arm in arms:
            for trial in arm.trials:
                named.setdefault(trial.key, (f"{group}{': ' if group else ''}{arm.name}", trial))
    return list(named.values())
