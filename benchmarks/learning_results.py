"""What the records of the learning proof say: tables, plots and the text between them."""

import statistics
from collections.abc import Iterator, Mapping, Sequence

from conditions import RESULTS, publish
from learning_parts import SEED_OF_SWEEPS, Arm, Groups, Part, Proof, Sweep
from learning_summary import difference, in_percent, spread, summary, top1s
from plots import Line, write_plot
from trials import Record, Records, Trial

Point = tuple[float, float, float]


def write_results(head: Sequence[str], proof: Proof, found: Mapping[str, Records]) -> None:
    """Writes a proof's file and its plots from the records of each part."""
    lines = [*head, *proof.setting]
    for name, records in found.items():
        lines += part_lines(name, proof, records)
    for name, records in found.items():
        lines += all_runs(name, proof.parts[name], records)
    publish(RESULTS / f"{proof.file}.md", lines)


def part_lines(name: str, proof: Proof, records: Records) -> list[str]:
    """One part as Markdown, with its plots: its sweeps, its comparisons, how to read it."""
    part = proof.parts[name]
    lines = [f"## ({name}) {part.title}", "", part.question, ""]
    if part.sweeps:
        lines += sweep_table(part.sweeps, records)
    groups = part.groups(records.get)
    for group, arms in groups.items():
        lines += [*([f"{group}:", ""] if group else []), *comparison(arms, records), ""]
    lines += summary(groups, records, part.x_name)
    for plot in plots(f"{proof.file}-{name}", part, groups, records):
        lines += [f"![{part.title}]({plot})", ""]
    return [*lines, *([part.reading, ""] if part.reading else [])]


def plots(name: str, part: Part, groups: Groups, records: Records) -> Iterator[str]:
    """Draws what there is to draw: all arms over x, and the curves of the last comparison; names of the files.

    name: of the first, without ending.
    """
    points: dict[str, list[Point]] = {}
    for arm in (arm for arms in groups.values() for arm in arms):
        for line in arm.lines if top1s(arm, records) else ():
            points.setdefault(line, []).append((arm.x, *in_percent(top1s(arm, records))))
    if points:
        lines = [Line(line, sorted(found)) for line, found in points.items()]
        write_plot(
            RESULTS / f"{name}.svg",
            part.title,
            lines,
            x_name=part.x_name,
            y_name="top-1, %",
            log_x=True,
            x_ticks=sorted({x for found in points.values() for x, _, _ in found}),
        )
        yield f"{name}.svg"
    group, arms = list(groups.items())[-1] if groups else ("", [])
    curves = [Line(arm.name, curve(arm, records)) for arm in arms]
    if any(line.points for line in curves):  # before its first training, a part has nothing to draw
        title = f"{part.title}{f', {group[0].lower()}{group[1:]}' if group else ''}"
        write_plot(RESULTS / f"{name}-curves.svg", title, curves, x_name="epoch", y_name="top-1, %")
        yield f"{name}-curves.svg"


def curve(arm: Arm, records: Records) -> list[Point]:
    """Mean and deviation of top-1 in percent over the trainings of an arm, by epoch."""
    found = [record.curve for trial in arm.trials if (record := records.get(trial)) is not None and record.top1]
    columns = zip(*found, strict=True)
    return [(column[0][0], *in_percent([top1 for _, top1 in column])) for column in columns]


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
        lines.append(f"| {sweep.batch:,} | {sweep.rule.name.upper()} | {', '.join(cells)} |")
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
            named[trial.key] = f"sweep: batch {sweep.batch:,}, {sweep.rule.name.upper()}, rate {rate:g}", trial
    for group, arms in part.groups(records.get).items():
        for arm in arms:
            for trial in arm.trials:
                named.setdefault(trial.key, (f"{group}{': ' if group else ''}{arm.name}", trial))
    return list(named.values())
