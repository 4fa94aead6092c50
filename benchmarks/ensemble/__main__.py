"""A collapsed ensemble against one long run, its best member, restarts and the mean of its weights, at equal epochs.

    OMP_NUM_THREADS=1 python -m benchmarks.ensemble --work FOLDER                         the digits, twice
    OMP_NUM_THREADS=1 python -m benchmarks.ensemble photographs --source imagenette224.tar --work FOLDER

For each seed one run in cycles is trained, the collapses of its snapshots, runs as long as all of them together, and as
many short ones as members; then each side is evaluated. These are ordinary runs in FOLDER, and what is finished is not
done again: a stopped command goes on where it was. At the end results/learning/ensemble.md is written from all that is
complete in FOLDER.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.conditions import code_version, head
from benchmarks.ensemble.cases import FAMILIES, TINY, Comparison, Family, comparison
from benchmarks.ensemble.engine import run_comparison
from benchmarks.ensemble.picture import picture
from benchmarks.ensemble.rows import APART_WEIGHTS, Row, differences, rows
from benchmarks.ensemble.table import introduction, section
from benchmarks.harness import Options, write_results
from podscale.evaluation import evaluation_json
from podscale.runs import RunDirectory


def rows_of_seed(sides: Comparison) -> dict[str, Row] | None:
    """Figures of a seed; None if it is not complete."""
    if any(not RunDirectory.for_config(config).evaluation.exists() for config in sides.evaluated):
        return None
    together = [
        evaluation_json.read_evaluation(RunDirectory.for_config(config).evaluation).ensemble
        for config in sides.evaluated
    ]
    members, apart, singles = (config for config in together if config is not None)
    return rows(members, apart, singles)


def family_page(family: Family, seeds: Sequence[int], workspace: Path, source: str) -> tuple[list[str], dict[str, str]]:
    """Part of the page about a family, and its picture by file name; both empty if no seed is complete."""
    sides = [comparison(family, seed, workspace, source) for seed in seeds]
    rows_by_seed = [metrics for config in sides if (metrics := rows_of_seed(config)) is not None]
    if not rows_by_seed:
        return [], {}
    name = f"ensemble-{family.name}.svg"
    # Weights averaged over unrelated runs are at chance, far off the scale.
    drawn = {row: values for row, values in differences(rows_by_seed).items() if row != APART_WEIGHTS}
    return section(family, sides[0], rows_by_seed, name), {name: picture(family.title, drawn)}


def main() -> None:
    parser = Options(__doc__)
    parser.add_size("families", full=["digits", "few-digits"], small=["tiny"], nargs="*", help=", ".join(FAMILIES))
    parser.add_argument("--source", help="archive of the photographs")
    parser.add_argument("--work", type=Path, help="folder of shards and runs")
    parser.add_size("--seeds", full=5, small=1, type=int)
    parser.add_argument("--write", action="store_true", help="train nothing: write what is complete")
    options = parser.read()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    families = {TINY.name: TINY} if options.small else FAMILIES
    if unknown := [name for name in options.families if name not in families]:
        parser.error(f"families: no such family (got {unknown[0]}). There are {', '.join(families)}.")
    if options.source is None and any(families[name].source is None for name in options.families):
        parser.error("--source: say where the photographs are")
    if options.work is None and not options.small:
        parser.error("--work: name a folder for shards and runs; a stopped command resumes from it")
    family_names = " ".join(options.families)
    command = f"OMP_NUM_THREADS=1 python -m benchmarks.ensemble {family_names} --seeds {options.seeds} --work FOLDER"
    if options.source is not None:
        command += f" --source {Path(options.source).name}"
    lines = [*head("A collapsed ensemble at equal epochs", ("torch", "numpy"), command), *introduction()]
    with tempfile.TemporaryDirectory() as scratch:
        work = (options.work or Path(scratch)).resolve()
        code = "small" if options.small else code_version()[:12]
        workspaces = {name: work / f"{name}-{code}" for name in families}
        if not options.write:
            train_all(options, families, workspaces)
        parts, pictures = list[str](), dict[str, str]()
        for name, family in families.items():
            source = family.source or options.source or "photographs"
            part, drawn = family_page(family, range(1, options.seeds + 1), workspaces[name], source)
            parts += part
            pictures |= drawn
    if not parts:
        parser.exit(1, f"nothing is complete in {work}, so nothing is written\n")
    write_results(options.results / "learning", "ensemble.md", [*lines, *parts], pictures)


def train_all(options: argparse.Namespace, families: Mapping[str, Family], workspaces: Mapping[str, Path]) -> None:
    """Train and evaluate what is not finished: a seed of every family before the next seed."""
    for seed in range(1, options.seeds + 1):
        for name in options.families:
            family = families[name]
            started = time.process_time()
            done = run_comparison(comparison(family, seed, workspaces[name], family.source or options.source))
            used = f"{time.process_time() - started:.0f} s of CPU: {', '.join(done)}" if done else "finished before"
            print(f"{name}, seed {seed}, {used}", flush=True)


if __name__ == "__main__":
    main()
