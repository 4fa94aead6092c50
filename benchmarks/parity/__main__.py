"""Do the two engines train alike? The same weights over the same batches of real images, in fp32 on CPUs.

    OMP_NUM_THREADS=1 python -m benchmarks.parity --work FOLDER                       digits, about ten minutes
    OMP_NUM_THREADS=1 python -m benchmarks.parity photographs --source imagenette224.tar --work FOLDER

Every case (SGD and LARS, batch-norm groups of 1 and 4 ranks, the update whole and sharded) is trained by PyTorch on
four gloo processes and by JAX on four simulated devices, once for each seed, which changes weights, order and crops.
What was trained is kept in FOLDER and not trained again, so that a stopped run goes on where it was. At the end the
family's table in benchmarks/results is written, of the cases that were asked for.
"""

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.conditions import RESULTS, code_version, head, publish
from benchmarks.parity.cases import (
    CASES,
    FAMILIES,
    GLOBAL_BATCH,
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
    """Trains what has no record, all seeds of a case and an engine in one go."""
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", nargs="?", default="digits", choices=FAMILIES)
    parser.add_argument("--source", help="where the photographs are")
    parser.add_argument("--work", type=Path, required=True, help="folder of shards and records")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--updates", type=int, default=50)
    parser.add_argument(
        "--cases", nargs="*", choices=[case.name for case in CASES], help="some of them, and a table of these alone"
    )
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    family = FAMILIES[options.family]
    source = options.source or family.source
    if source is None:
        parser.error("--source: say where the photographs are")
    command = f"python -m benchmarks.parity {family.name} --seeds {options.seeds} --updates {options.updates}"
    if options.cases is not None:
        command += f" --cases {' '.join(options.cases)}"
    start = head(f"The two engines: {family.title}", ("jax", "torch", "numpy"), command)
    records = Records(options.work, family.name, options.updates, code_version()[1])
    cases = [case for case in CASES if options.cases is None or case.name in options.cases]
    train_due(family, cases, options.seeds, options.updates, options.work.resolve(), source, records)
    found = {
        case: {engine: [records.get(case, engine, seed) for seed in range(options.seeds)] for engine in ENGINES}
        for case in cases
    }
    publish(RESULTS / f"parity-{family.name}.md", [*start, *table(found)])


if __name__ == "__main__":
    main()
