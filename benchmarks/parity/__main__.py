"""Do the two engines train alike? The same weights over the same batches of real images, in fp32 on CPUs.

    OMP_NUM_THREADS=1 python -m benchmarks.parity --work FOLDER                       digits, about ten minutes
    OMP_NUM_THREADS=1 python -m benchmarks.parity photographs --source imagenette224.tar --work FOLDER

Every case (SGD and LARS, batch-norm groups of 1 and 4 ranks, the update whole and sharded) is trained by PyTorch on
four gloo processes and by JAX on four simulated devices, once for each seed, which changes weights, order and crops.
Finished trainings are kept in FOLDER and not repeated, so that a stopped command resumes. At the end the family's table
is written, of the cases that were asked for.
"""

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.conditions import code_version, head
from benchmarks.harness import Options, write_results
from benchmarks.parity.cases import (
    CASES,
    FAMILIES,
    GLOBAL_BATCH,
    TINY,
    Case,
    Family,
    Trained,
    document,
    prepare,
    shard_set_of,
)
from benchmarks.parity.engines import ENGINES
from benchmarks.parity.table import table


class Records:
    """Trainings in a folder, of one version of the code, by case, engine and seed."""

    def __init__(self, folder: Path, family: str, updates: int, code: str) -> None:
        self._folder = folder / f"{family}-{updates}-{code[:12]}"
        self._folder.mkdir(parents=True, exist_ok=True)

    def path(self, case: Case, engine: str, seed: int) -> Path:
        return self._folder / f"{case.name}-{engine}-{seed}.json"

    def get(self, case: Case, engine: str, seed: int) -> Trained | None:
        path = self.path(case, engine, seed)
        return Trained(**json.loads(path.read_text())) if path.exists() else None

    def keep(self, case: Case, engine: str, seed: int, trained: Trained) -> None:
        path = self.path(case, engine, seed)
        path.with_suffix(".part").write_text(json.dumps(asdict(trained)))
        path.with_suffix(".part").rename(path)


def train_due(
    family: Family, cases: Sequence[Case], seeds: int, updates: int, work: Path, source: str, records: Records
) -> None:
    """Train the runs without a record, all seeds of a case and an engine in one go."""
    for case in cases:
        for engine, train in ENGINES.items():
            due = [seed for seed in range(seeds) if records.get(case, engine, seed) is None]
            if not due:
                continue
            config = document(family, case, due[0], work, source, engine, epochs=1.0)
            shard_set = shard_set_of(config)
            epochs = updates * GLOBAL_BATCH / len(shard_set.split("train"))
            configs = [document(family, case, seed, work, source, engine, epochs) for seed in due]
            weights = [work / "weights" / f"{family.name}-{seed}" / "model.safetensors" for seed in due]
            given = [prepare(c, shard_set, updates, w) for c, w in zip(configs, weights, strict=True)]
            for seed, trained in zip(due, train(configs[0], given), strict=True):
                records.keep(case, engine, seed, trained)
            print(f"{case.name}, {engine}: {len(due)} trained", flush=True)


def main() -> None:
    parser = Options(__doc__)
    parser.add_size("family", full="digits", small="tiny", nargs="?", choices=[*FAMILIES, TINY.name])
    parser.add_argument("--source", help="archive of the photographs")
    parser.add_argument("--work", type=Path, help="folder of shards and records")
    parser.add_size("--seeds", full=5, small=2, type=int)
    parser.add_size("--updates", full=50, small=2, type=int)
    names = [case.name for case in CASES]
    small = ["lars-1-sharded"]
    parser.add_size("--cases", full=names, small=small, nargs="+", choices=names, help="rows of the table")
    options = parser.read()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    family = TINY if options.family == TINY.name else FAMILIES[options.family]
    source = options.source or family.source
    if source is None:
        parser.error("--source: say where the photographs are")
    if options.work is None and not options.small:
        parser.error("--work: name a folder for shards and records; a stopped command resumes from it")
    command = f"OMP_NUM_THREADS=1 python -m benchmarks.parity {family.name} --seeds {options.seeds}"
    command += f" --updates {options.updates} --work FOLDER"
    if family.source is None:
        command += f" --source {Path(source).name}"
    if options.cases != names:
        command += f" --cases {' '.join(options.cases)}"
    start = head(f"The two engines: {family.title}", ("jax", "torch", "numpy"), command)
    cases = [case for case in CASES if case.name in options.cases]
    with tempfile.TemporaryDirectory() as scratch:
        work = (options.work or Path(scratch)).resolve()
        records = Records(work, family.name, options.updates, "small" if options.small else code_version())
        train_due(family, cases, options.seeds, options.updates, work, source, records)
        found = {
            case: {engine: [records.get(case, engine, seed) for seed in range(options.seeds)] for engine in ENGINES}
            for case in cases
        }
    write_results(options.results, f"parity-{family.name}.md", [*start, *table(found)])


if __name__ == "__main__":
    main()
