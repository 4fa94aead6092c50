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
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.conditions import RESULTS, code_version, head, publish
from benchmarks.ensemble.cases import FAMILIES, Comparison, Family, comparison
from benchmarks.ensemble.engine import carry_out
from benchmarks.ensemble.picture import picture
from benchmarks.ensemble.rows import APART_WEIGHTS, Row, differences, rows
from benchmarks.ensemble.table import introduction, section
from podscale.evaluation import evaluation_json
from podscale.runs import RunDirectory

LEARNING = RESULTS / "learning"


def found(sides: Comparison) -> dict[str, Row] | None:
    """The figures of a seed; None where it is not complete."""
    if any(not RunDirectory.for_config(config).evaluation.exists() for config in sides.evaluated):
        return None
    together = [
        evaluation_json.read_evaluation(RunDirectory.for_config(config).evaluation).ensemble
        for config in sides.evaluated
    ]
    members, apart, singles = (one for one in together if one is not None)
    return rows(members, apart, singles)


def compared(family: Family, seeds: Sequence[int], workspace: Path, source: str) -> list[str]:
    """The part of the page about a family, and its picture beside the page; nothing where no seed is complete."""
    sides = [comparison(family, seed, workspace, source) for seed in seeds]
    seen = [figures for one in sides if (figures := found(one)) is not None]
    if not seen:
        return []
    name = f"ensemble-{family.name}.svg"
    LEARNING.mkdir(parents=True, exist_ok=True)
    drawn = {row: values for row, values in differences(seen).items() if row != APART_WEIGHTS}  # chance: far off
    (LEARNING / name).write_text(picture(family.title, drawn))
    return section(family, sides[0], seen, name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=["digits", "few-digits"], help=", ".join(FAMILIES))
    parser.add_argument("--source", help="where the photographs are")
    parser.add_argument("--work", type=Path, required=True, help="folder of shards and runs")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="train nothing: write what is complete")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    chosen = [FAMILIES[name] for name in options.families if name in FAMILIES]
    if len(chosen) < len(options.families):
        parser.error(f"families are {', '.join(FAMILIES)}")
    if options.source is None and any(family.source is None for family in chosen):
        parser.error("--source: say where the photographs are")
    named = " ".join(options.families)
    command = f"python -m benchmarks.ensemble {named} --seeds {options.seeds}"
    lines = [*head("A collapsed ensemble at equal epochs", ("torch", "numpy"), command), *introduction()]
    code, seeds = code_version()[1], range(1, options.seeds + 1)
    places = {name: (options.work / f"{name}-{code[:12]}").resolve() for name in FAMILIES}
    for seed in seeds if not options.write else ():  # of every family before the next: a cut says something of each
        for family in chosen:
            started = time.process_time()
            done = carry_out(comparison(family, seed, places[family.name], family.source or options.source))
            used = f"{time.process_time() - started:.0f} s of CPU: {', '.join(done)}" if done else "finished before"
            print(f"{family.name}, seed {seed}, {used}", flush=True)
    for name, family in FAMILIES.items():
        lines += compared(family, seeds, places[name], family.source or options.source or "photographs")
    publish(LEARNING / "ensemble.md", lines)


if __name__ == "__main__":
    main()
