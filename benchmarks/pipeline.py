"""Where the time of `podscale run digits` goes: the stages, and the pipeline around them.

    python benchmarks/pipeline.py [--runs 3]
    OMP_NUM_THREADS=1 python benchmarks/pipeline.py --engines pytorch jax    # end to end, one engine beside the other

Each run begins in an empty workspace, so that JAX compiles in it; beside other engines it then runs once more with
nothing but the programs that it has kept there. "pipeline" is all that is not inside a stage: imports, kfp, starting
the stages' processes, artifacts. Beside it: CPU seconds of importing what each process of a run imports, in fresh
processes.
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from conditions import RESULTS, head, publish

GOAL = 0.10
AGAIN = "jax, programs kept"
IMPORTS = {
    "podscale run": "podscale.cli.run",
    "a stage's process (kfp executor)": "kfp.dsl.executor_main, podscale.components.steps",
    "a rank, or the parent of several": "podscale.pytorch.worker",
}


def run(workspace: Path, changes: list[str]) -> dict[str, float]:
    """Wall seconds of each stage, of the pipeline around them and of all, CPU seconds of all, and the load before.

    Of the workspace only compiled programs are left. Raises where the run fails.
    """
    load, before = os.getloadavg()[0], cpu_seconds()
    command = [sys.executable, "-m", "podscale", "run", "digits", "--set", f"run.workspace={workspace}"]
    for change in changes:
        command += ["--set", change]
    shown = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    shutil.rmtree(workspace / "runs")
    shutil.rmtree(workspace / "datasets")
    ended = json.loads(shown.stdout.splitlines()[-1])
    assert ended["event"] == "ended"
    whole = {"total": ended["seconds"], "CPU": cpu_seconds() - before, "load": load}
    return {**ended["stages"], "pipeline": ended["pipeline"], **whole}


def cpu_seconds() -> float:
    """Of all processes that this one has waited for, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def import_seconds(modules: str) -> float:
    """CPU seconds of a fresh interpreter that imports them: the least of three."""
    seconds = []
    for _ in range(3):
        before = cpu_seconds()
        subprocess.run([sys.executable, "-c", f"import {modules}"], check=True)
        seconds.append(cpu_seconds() - before)
    return min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--set", dest="changes", action="append", default=[], help="change of the document, name=value")
    parser.add_argument("--engines", nargs="+", default=["pytorch"], choices=["pytorch", "jax"], help="in turn")
    parser.add_argument("--results", type=Path, help="default: pipeline.md, or pipeline-engines.md of several engines")
    options = parser.parse_args()
    several = len(options.engines) > 1
    lines = head("A run, end to end" if several else "The pipeline around the stages", ["torch", "jax", "kfp"])
    tables: dict[str, list[dict[str, float]]] = {}
    for _ in range(options.runs):
        for engine in options.engines:
            changes = [f"train.engine={engine}", *options.changes]
            with tempfile.TemporaryDirectory() as workspace:
                tables.setdefault(engine, []).append(run(Path(workspace), changes))
                if several and engine == "jax":
                    tables.setdefault(AGAIN, []).append(run(Path(workspace), changes))
    lines += of_runs(tables)
    if several:
        lines += ["", *of_engines(tables)]
    else:
        (runs,) = tables.values()
        share = statistics.median(table["pipeline"] / table["total"] for table in runs)
        lines += ["", f"The pipeline's median share is {share:.1%} (goal: below {GOAL:.0%}).", "", *of_imports()]
    publish(options.results or RESULTS / ("pipeline-engines.md" if several else "pipeline.md"), lines)


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


def of_imports() -> list[str]:
    """CPU seconds of what each process of a run imports."""
    lines = ["## Imports", "", "| process | CPU s |", "|---|---:|"]
    return lines + [f"| {name} | {import_seconds(modules):.2f} |" for name, modules in IMPORTS.items()]


if __name__ == "__main__":
    main()
