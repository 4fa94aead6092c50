"""Time of `podscale run digits`: the stages, and the pipeline around them.

    python -m benchmarks.pipeline [--runs 3]
    OMP_NUM_THREADS=1 python -m benchmarks.pipeline --engines pytorch jax    # end to end, one engine beside the other

Each run begins in an empty workspace, so that JAX compiles in it; beside other engines it then runs once more with
nothing but the programs that it has kept there. "pipeline" is all that is not inside a stage: imports, kfp, starting
the stages' processes, artifacts. Beside it: CPU seconds of importing what each process of a run imports, in fresh
processes.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.conditions import head
from benchmarks.harness import Options, write_results
from benchmarks.measure import cpu_seconds

GOAL = 0.10
AGAIN = "jax, programs kept"
SMALL = (
    *("train.epochs=1", "train.schedule.warmup_epochs=0", "train.global_batch=128", "input.image_size=8"),
    *("model.width=4", "launch.processes=1"),
)
IMPORTS = {
    "podscale run": "podscale.cli.launch_view",
    "a stage's process (kfp executor)": "kfp.dsl.executor_main, podscale.components.steps",
    "a rank, or the parent of several": "podscale.pytorch.worker",
}


def run(workspace: Path, changes: list[str]) -> dict[str, float]:
    """Run the digits in a workspace, and remove all but compiled programs.

    Returns wall seconds of each stage, of the pipeline around them and of all, CPU seconds of all, and the load before.
    Raises CalledProcessError if the run fails.
    """
    load, before = os.getloadavg()[0], cpu_seconds(children=True)
    command = [sys.executable, "-m", "podscale", "run", "digits", "--set", f"run.workspace={workspace}"]
    for change in changes:
        command += ["--set", change]
    shown = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    shutil.rmtree(workspace / "runs")
    shutil.rmtree(workspace / "datasets")
    ended = json.loads(shown.stdout.splitlines()[-1])
    assert ended["event"] == "ended"
    whole = {"total": ended["seconds"], "CPU": cpu_seconds(children=True) - before, "load": load}
    return {**ended["stages"], "pipeline": ended["pipeline"], **whole}


def import_seconds(modules: str, rounds: int) -> float:
    """CPU seconds of a fresh interpreter that imports modules: the least of some rounds."""
    seconds = []
    for _ in range(rounds):
        before = cpu_seconds(children=True)
        subprocess.run([sys.executable, "-c", f"import {modules}"], check=True)
        seconds.append(cpu_seconds(children=True) - before)
    return min(seconds)


def main() -> None:
    parser = Options(__doc__)
    parser.add_size("--runs", full=3, small=1, type=int)
    parser.add_argument("--set", dest="changes", action="append", default=[], help="change of the document, name=value")
    parser.add_size("--engines", full=["pytorch"], small=["pytorch", "jax"], nargs="+", choices=["pytorch", "jax"])
    options = parser.read()
    several = len(options.engines) > 1
    again = several and not options.small
    lines = head("A run, end to end" if several else "The pipeline around the stages", ["torch", "jax", "kfp"])
    changes = [*(SMALL if options.small else ()), *options.changes]
    tables: dict[str, list[dict[str, float]]] = {}
    for _ in range(options.runs):
        for engine in options.engines:
            with tempfile.TemporaryDirectory() as workspace:
                for name in (engine, AGAIN) if again and engine == "jax" else (engine,):
                    found = run(Path(workspace), [f"train.engine={engine}", *changes])
                    tables.setdefault(name, []).append(found)
    lines += of_runs(tables)
    if several:
        write_results(options.results, "pipeline-engines.md", [*lines, "", *of_engines(tables)])
    if not several or options.small:
        lines += ["", of_shares(next(iter(tables.values()))), "", *of_imports(1 if options.small else 3)]
        write_results(options.results, "pipeline.md", lines)


def of_shares(runs: list[dict[str, float]]) -> str:
    """Sentence on the pipeline's share of a run."""
    share = statistics.median(table["pipeline"] / table["total"] for table in runs)
    return f"The pipeline's median share is {share:.1%} (goal: below {GOAL:.0%})."


def of_runs(tables: dict[str, list[dict[str, float]]]) -> list[str]:
    """A row for each run, in the order in which they were carried out."""
    names = ["shard", "train", "evaluate", "report", "pipeline", "total", "CPU"]
    lines = [
        f"| run | engine | {' | '.join(f'{name}, s' for name in names)} | pipeline's share | load before |",
        "|---|---|" + "---:|" * (len(names) + 2),
    ]
    for number, together in enumerate(zip(*tables.values(), strict=True), 1):
        for engine, table in zip(tables, together, strict=True):
            seconds = " | ".join(f"{table[name]:.1f}" for name in names)
            share = f"{table['pipeline'] / table['total']:.1%}"
            lines.append(f"| {number} | {engine} | {seconds} | {share} | {table['load']:.1f} |")
    return lines


def of_engines(tables: dict[str, list[dict[str, float]]]) -> list[str]:
    """Everything against the first engine, run by run, so that a busy minute of the machine meets both."""
    first, *others = tables
    names = ["train", "evaluate", "total", "CPU"]
    lines = [f"| median (least to most) of the ratio | {' | '.join(names)} |", "|---|" + "---:|" * len(names)]
    for other in others:
        cells = []
        for name in names:
            pairs = zip(tables[other], tables[first], strict=True)
            ratios = sorted(mine[name] / theirs[name] for mine, theirs in pairs)
            cells.append(f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
        lines.append(f"| {other} / {first} | {' | '.join(cells)} |")
    return lines


def of_imports(rounds: int) -> list[str]:
    """CPU seconds of the imports of each process of a run."""
    lines = ["## Imports", "", "| process | CPU s |", "|---|---:|"]
    return lines + [f"| {name} | {import_seconds(modules, rounds):.2f} |" for name, modules in IMPORTS.items()]


if __name__ == "__main__":
    main()
