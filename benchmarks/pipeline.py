"""Where the time of `podscale run digits` goes: the stages, and the pipeline around them.

    python benchmarks/pipeline.py [--runs 3]

Each run begins in an empty workspace. "pipeline" is all that is not inside a stage: imports, kfp, starting the stages'
processes, artifacts. Beside it: CPU seconds of importing what each process of a run imports, in fresh processes.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from conditions import RESULTS, head, publish

GOAL = 0.10
IMPORTS = {
    "podscale run": "podscale.commands.run",
    "a stage's process (kfp executor)": "kfp.dsl.executor_main, podscale.components.work",
    "a rank, or the parent of several": "podscale.pytorch.rank",
}


def run(changes: list[str]) -> dict[str, float]:
    """Wall seconds of each stage, of the pipeline around them and of all; raises where the run fails."""
    with tempfile.TemporaryDirectory() as workspace:
        command = [sys.executable, "-m", "podscale", "run", "digits", "--set", f"run.workspace={workspace}"]
        for change in changes:
            command += ["--set", change]
        shown = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    ended = json.loads(shown.stdout.splitlines()[-1])
    assert ended["event"] == "ended"
    return {**ended["stages"], "pipeline": ended["pipeline"], "total": ended["seconds"]}


def import_seconds(modules: str) -> float:
    """CPU seconds of a fresh interpreter that imports them: the least of three."""
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", f"import {modules}"], check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--set", dest="changes", action="append", default=[], help="change of the document, name=value")
    parser.add_argument("--results", type=Path, default=RESULTS / "pipeline.md")
    options = parser.parse_args()
    lines = head("The pipeline around the stages", ["torch", "kfp"])
    tables = []
    for _ in range(options.runs):
        load = os.getloadavg()[0]
        tables.append({**run(options.changes), "load": load})
    names = ["shard", "train", "evaluate", "report", "pipeline", "total", "load"]
    lines.append(f"| run | {' | '.join(f'{name}, s' for name in names[:-1])} | pipeline's share | load before |")
    lines.append("|---|" + "---:|" * (len(names) + 1))
    for number, table in enumerate(tables, 1):
        seconds = " | ".join(f"{table[name]:.1f}" for name in names[:-1])
        lines.append(f"| {number} | {seconds} | {table['pipeline'] / table['total']:.1%} | {table['load']:.1f} |")
    share = statistics.median(table["pipeline"] / table["total"] for table in tables)
    lines += ["", f"The pipeline's median share is {share:.1%} (goal: below {GOAL:.0%}).", "", "## Imports", ""]
    lines += ["| process | CPU s |", "|---|---:|"]
    lines += [f"| {name} | {import_seconds(modules):.2f} |" for name, modules in IMPORTS.items()]
    publish(options.results, lines)


if __name__ == "__main__":
    main()
