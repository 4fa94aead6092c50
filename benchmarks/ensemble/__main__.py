"""A collapsed ensemble against one long run, its best member, restarts and the mean of its weights, at equal epochs.

    OMP_NUM_THREADS=1 python -m benchmarks.ensemble --work FOLDER                         the digits, twice
    OMP_NUM_THREADS=1 python -m benchmarks.ensemble photographs --source imagenette224.tar --work FOLDER

For each seed this trains a run in cycles, the collapses of its snapshots, runs as long as all of them together, and as
many short runs as members, and evaluates them. They are ordinary runs in FOLDER, and a stopped command resumes. At the
end it writes results/learning/ensemble.md from all complete seeds in FOLDER.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.conditions import code_version, head
from benchmarks.ensemble.cases import TASKS, TINY, Comparison, Task, build_comparison
from benchmarks.ensemble.page import introduction, picture, section
from benchmarks.ensemble.results import RESTART_WEIGHTS, ScoreRow, differences, rows
from benchmarks.ensemble.training import run_comparison
from benchmarks.harness import Options, write_results
from podscale.evaluation import evaluation_json
from podscale.runs import RunDirectory


def read_rows(comparison: Comparison) -> dict[str, ScoreRow] | None:
    """Return the rows of a seed; None if it is not complete."""
    paths = [RunDirectory.for_config(config).evaluation for config in comparison.evaluated]
    if not all(path.exists() for path in paths):
        return None
    scores = [evaluation_json.read_evaluation(path).ensemble for path in paths]
    members, restarts, singles = (ensemble for ensemble in scores if ensemble is not None)
    return rows(members, restarts, singles)


def task_section(task: Task, seeds: Sequence[int], workspace: Path, source: str) -> tuple[list[str], dict[str, str]]:
    """Return the section of a task, and its picture by file name; both empty if no seed is complete."""
    comparisons = [build_comparison(task, seed, workspace, source) for seed in seeds]
    rows_by_seed = [seed_rows for comparison in comparisons if (seed_rows := read_rows(comparison)) is not None]
    if not rows_by_seed:
        return [], {}
    name = f"ensemble-{task.name}.svg"
    # Weights averaged over unrelated runs are at chance, far off the scale.
    drawn = {row: values for row, values in differences(rows_by_seed).items() if row != RESTART_WEIGHTS}
    return section(task, comparisons[0], rows_by_seed, name), {name: picture(task.title, drawn)}


def main() -> None:
    parser = Options(__doc__)
    parser.add_size(
        "tasks", metavar="TASK", full=["digits", "few-digits"], small=["tiny"], nargs="*", help=", ".join(TASKS)
    )
    parser.add_argument("--source", help="archive of the photographs")
    parser.add_argument("--work", type=Path, help="folder of shards and runs")
    parser.add_size("--seeds", full=5, small=1, type=int)
    parser.add_argument("--write", action="store_true", help="train nothing, write the page from complete seeds")
    options = parser.read()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    tasks = {TINY.name: TINY} if options.small else TASKS
    if unknown := [name for name in options.tasks if name not in tasks]:
        parser.error(f"TASK: unknown task (got {unknown[0]}). Choose from {', '.join(tasks)}.")
    if options.source is None and any(tasks[name].source is None for name in options.tasks):
        parser.error("--source: missing for photographs. Give their archive.")
    if options.work is None and not options.small:
        parser.error("--work: missing. Give a folder for shards and runs; a stopped command resumes from it.")
    names = " ".join(options.tasks)
    command = f"OMP_NUM_THREADS=1 python -m benchmarks.ensemble {names} --seeds {options.seeds} --work FOLDER"
    if options.source is not None:
        command += f" --source {Path(options.source).name}"
    lines = [*head("A collapsed ensemble at equal epochs", ("torch", "numpy"), command), *introduction()]
    with tempfile.TemporaryDirectory() as scratch:
        work = (options.work or Path(scratch)).resolve()
        code = "small" if options.small else code_version()[:12]
        workspaces = {name: work / f"{name}-{code}" for name in tasks}
        if not options.write:
            train_all(options, tasks, workspaces)
        parts, pictures = list[str](), dict[str, str]()
        for name, task in tasks.items():
            source = task.source or options.source or "photographs"
            part, drawn = task_section(task, range(1, options.seeds + 1), workspaces[name], source)
            parts += part
            pictures |= drawn
    if not parts:
        parser.exit(1, f"no page written: {work} has no complete seed\n")
    write_results(options.results / "learning", "ensemble.md", [*lines, *parts], pictures)


def train_all(options: argparse.Namespace, tasks: Mapping[str, Task], workspaces: Mapping[str, Path]) -> None:
    """Train and evaluate the unfinished runs, a seed of every task before the next seed."""
    for seed in range(1, options.seeds + 1):
        for name in options.tasks:
            source, start = tasks[name].source or options.source, time.process_time()
            done = run_comparison(build_comparison(tasks[name], seed, workspaces[name], source))
            status = f"{time.process_time() - start:.0f} s of CPU: {', '.join(done)}" if done else "already complete"
            print(f"{name}, seed {seed}, {status}", flush=True)


if __name__ == "__main__":
    main()
