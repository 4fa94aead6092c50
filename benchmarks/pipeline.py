"""Time of `podscale run digits`: the stages, and the pipeline around them.

    python -m benchmarks.pipeline [--runs 3]
    OMP_NUM_THREADS=1 python -m benchmarks.pipeline --engines pytorch jax    # end to end, by engine

Each run starts in an empty workspace, where JAX compiles. With several engines, JAX then runs again with the compiled
programs. "pipeline" is the time outside of stages: imports, kfp, start of the stages' processes, artifacts. A second
table has the CPU seconds of the imports of each process of a run.
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
COMPILED = "jax, compiled"
PIPELINE = (
    "Each run starts in an empty workspace. `pipeline` is the time outside of stages: imports, kfp, start of the "
    "stages' processes, artifacts."
)
WITH_PROGRAMS = "`jax, compiled` starts with the compiled programs of the `jax` run before it."
SMALL = (
    *("train.epochs=1", "train.schedule.warmup_epochs=0", "train.global_batch=128", "input.image_size=8"),
    *("model.width=4", "launch.processes=1"),
)
IMPORTS = {
    "podscale run": "podscale.api.launch_view",
    "a stage's process (kfp executor)": "kfp.dsl.executor_main, podscale.components.steps",
    "a rank, or the fork server": "podscale.pytorch.worker",
}


def run(workspace: Path, changes: list[str]) -> dict[str, float]:
    """Run the digits in a workspace, and remove all files but compiled programs.

    Returns wall seconds of each stage, of the pipeline and in all, CPU seconds, and the load average before.
    """
    load, cpu_before = os.getloadavg()[0], cpu_seconds(children=True)
    command = [sys.executable, "-m", "podscale", "run", "digits", "--set", f"run.workspace={workspace}"]
    for change in changes:
        command += ["--set", change]
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    shutil.rmtree(workspace / "runs")
    shutil.rmtree(workspace / "datasets")
    ended = json.loads(result.stdout.splitlines()[-1])
    assert ended["event"] == "ended"
    total = {"total": ended["seconds"], "CPU": cpu_seconds(children=True) - cpu_before, "load": load}
    return {**ended["stages"], "pipeline": ended["pipeline"], **total}


def import_seconds(modules: str, rounds: int) -> float:
    """Return the CPU seconds of a new interpreter that imports modules, the least of some rounds."""
    seconds = []
    for _ in range(rounds):
        before = cpu_seconds(children=True)
        subprocess.run([sys.executable, "-c", f"import {modules}"], check=True)
        seconds.append(cpu_seconds(children=True) - before)
    return min(seconds)


def main() -> None:
    parser = Options(__doc__)
    parser.add_size("--runs", full=3, small=1, type=int)
    parser.add_argument(
        "--set", dest="changes", action="append", default=[], help="change of the run document, name=value"
    )
    parser.add_size("--engines", full=["pytorch"], small=["pytorch", "jax"], nargs="+", choices=["pytorch", "jax"])
    options = parser.read()
    several = len(options.engines) > 1
    lines = head(f"`podscale run digits`: {'engines' if several else 'stages and pipeline'}", ["torch", "jax", "kfp"])
    changes = [*(SMALL if options.small else ()), *options.changes]
    tables: dict[str, list[dict[str, float]]] = {}
    for _ in range(options.runs):
        for engine in options.engines:
            with tempfile.TemporaryDirectory() as workspace:
                compiled = several and not options.small and engine == "jax"
                for name in (engine, COMPILED) if compiled else (engine,):
                    seconds = run(Path(workspace), [f"train.engine={engine}", *changes])
                    tables.setdefault(name, []).append(seconds)
    lines += [PIPELINE, *([WITH_PROGRAMS] if COMPILED in tables else []), "", *runs_table(tables)]
    if several:
        write_results(options.results, "pipeline-engines.md", [*lines, "", *engines_table(tables)])
    if not several or options.small:
        lines += ["", share_sentence(next(iter(tables.values()))), "", *imports_table(1 if options.small else 3)]
        write_results(options.results, "pipeline.md", lines)


def share_sentence(runs: list[dict[str, float]]) -> str:
    share = statistics.median(table["pipeline"] / table["total"] for table in runs)
    return f"The pipeline's median share is {share:.1%} (goal: below {GOAL:.0%})."


def runs_table(tables: dict[str, list[dict[str, float]]]) -> list[str]:
    """Return a row for each run, in the order of the runs."""
    names = ["shard", "train", "evaluate", "report", "pipeline", "total", "CPU"]
    lines = [
        f"| run | engine | {' | '.join(f'{name}, s' for name in names)} | pipeline's share | load before |",
        "|---|---|" + "---:|" * (len(names) + 2),
    ]
    for number, engines in enumerate(zip(*tables.values(), strict=True), 1):
        for engine, table in zip(tables, engines, strict=True):
            seconds = " | ".join(f"{table[name]:.1f}" for name in names)
            share = f"{table['pipeline'] / table['total']:.1%}"
            lines.append(f"| {number} | {engine} | {seconds} | {share} | {table['load']:.1f} |")
    return lines


def engines_table(tables: dict[str, list[dict[str, float]]]) -> list[str]:
    """Return the ratios to the first engine, run by run, so that other load affects both alike."""
    first, *others = tables
    names = ["train", "evaluate", "total", "CPU"]
    lines = [f"| median (minimum to maximum) of the ratio | {' | '.join(names)} |", "|---|" + "---:|" * len(names)]
    for other in others:
        cells = []
        for name in names:
            pairs = zip(tables[other], tables[first], strict=True)
            ratios = sorted(run[name] / base[name] for run, base in pairs)
            cells.append(f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
        lines.append(f"| {other} / {first} | {' | '.join(cells)} |")
    return lines


def imports_table(rounds: int) -> list[str]:
    lines = ["## Imports", "", "| process | CPU s |", "|---|---:|"]
    return lines + [f"| {name} | {import_seconds(modules, rounds):.2f} |" for name, modules in IMPORTS.items()]


if __name__ == "__main__":
    main()
