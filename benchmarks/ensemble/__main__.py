"""A collapsed ensemble against one long run, its best member, restarts and the mean of its weights, at equal epochs.

    OMP_NUM_THREADS=1 python -m benchmarks.ensemble --work FOLDER                         the digits, twice
    OMP_NUM_THREADS=1 python -m benchmarks.ensemble photographs --source imagenette224.tar --work FOLDER

For each seed one run in cycles is trained, the collapses of its snapshots, runs as long as all of them together, and as
many short ones as members; then each side is evaluated. These are stages of ordinary runs in FOLDER, and a finished
stage is not done again: a stopped command goes on where it was. At the end results/learning/ensemble.md is written from
the families named, with all seeds that are complete.
"""

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.conditions import RESULTS, code_version, head, publish
from benchmarks.ensemble.cases import FAMILIES, Comparison, Family, comparison
from benchmarks.ensemble.picture import picture
from benchmarks.ensemble.rows import Row, differences, rows
from benchmarks.ensemble.table import introduction, section
from podscale import stages
from podscale.evaluate import evaluation
from podscale.rundir import RunDirectory
from podscale.stopping import stoppable

LEARNING = RESULTS / "learning"


def carry_out(sides: Comparison) -> None:
    """Trains and evaluates what is not finished."""
    shard_set = stages.shard(sides.cycles.data, sides.cycles.run.workspace)
    assert shard_set is not None, "all parts at once"
    for config in sides.trained:
        started = time.monotonic()
        if not stages.train(config, shard_set.location).reused:
            print(f"{config.run.id}: trained in {time.monotonic() - started:.0f} s", flush=True)
    for config in sides.evaluated:
        stages.evaluate(config, shard_set.location)


def found(sides: Comparison) -> dict[str, Row] | None:
    """The figures of a seed; None where it is not complete."""
    if any(not RunDirectory.of(config).evaluation.exists() for config in sides.evaluated):
        return None
    together = [evaluation.read(RunDirectory.of(config).evaluation).ensemble for config in sides.evaluated]
    members, apart, singles = (one for one in together if one is not None)
    return rows(members, apart, singles)


def compared(family: Family, seeds: Sequence[int], workspace: Path, source: str) -> list[str]:
    """The part of the page about a family, and its picture beside the page."""
    sides = [comparison(family, seed, workspace, source) for seed in seeds]
    seen = [figures for one in sides if (figures := found(one)) is not None]
    name = f"ensemble-{family.name}.svg"
    if seen:
        LEARNING.mkdir(parents=True, exist_ok=True)
        title = f"{family.title}: points of top-1 more than one long run, n = {len(seen)}"
        (LEARNING / name).write_text(picture(title, differences(seen)))
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
    names = " ".join(family.name for family in chosen)
    start = head(
        "A collapsed ensemble at equal epochs",
        ("torch", "numpy"),
        f"python -m benchmarks.ensemble {names} --seeds {options.seeds}",
    )
    code, seeds = code_version()[1], range(1, options.seeds + 1)
    places = {family.name: (options.work / f"{family.name}-{code[:12]}").resolve() for family in chosen}
    if not options.write:
        with stoppable():
            for seed in seeds:  # one of every family before the next: what is cut short says something of each
                for family in chosen:
                    sides = comparison(family, seed, places[family.name], family.source or options.source)
                    carry_out(sides)
    lines = [*start, *introduction()]
    for family in chosen:
        lines += compared(family, seeds, places[family.name], family.source or options.source)
    publish(LEARNING / "ensemble.md", lines)


if __name__ == "__main__":
    main()
