"""Parity of the two engines: the same weights over the same batches of real images, in fp32 on CPUs.

    OMP_NUM_THREADS=1 python -m benchmarks.parity --work FOLDER                       digits, about ten minutes
    OMP_NUM_THREADS=1 python -m benchmarks.parity photographs --source imagenette224.tar --work FOLDER

Every case (SGD and LARS, batch-norm groups of 1 and 4 ranks, update replicated and sharded) is trained by PyTorch on
four gloo processes and by JAX on four simulated devices, once for each seed, which changes weights, order and crops.
Results are kept in FOLDER, so a stopped command resumes. At the end the table of the chosen cases is written.
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
    GLOBAL_BATCH,
    TASKS,
    TINY,
    Case,
    Task,
    TrainingResult,
    document,
    open_or_pack,
    prepare_input,
)
from benchmarks.parity.engines import ENGINES
from benchmarks.parity.table import table


class ResultStore:
    """Results of one version of the code in a folder, by case, engine and seed."""

    def __init__(self, folder: Path, task: str, steps: int, code: str) -> None:
        self._folder = folder / f"{task}-{steps}-{code[:12]}"
        self._folder.mkdir(parents=True, exist_ok=True)

    def _path(self, case: Case, engine: str, seed: int) -> Path:
        return self._folder / f"{case.name}-{engine}-{seed}.json"

    def get(self, case: Case, engine: str, seed: int) -> TrainingResult | None:
        path = self._path(case, engine, seed)
        return TrainingResult(**json.loads(path.read_text())) if path.exists() else None

    def put(self, case: Case, engine: str, seed: int, result: TrainingResult) -> None:
        path = self._path(case, engine, seed)
        path.with_suffix(".part").write_text(json.dumps(asdict(result)))
        path.with_suffix(".part").rename(path)


def train_missing(
    task: Task, cases: Sequence[Case], seeds: int, steps: int, work: Path, source: str, store: ResultStore
) -> None:
    """Train the runs without a result, all seeds of a case and an engine in the same processes."""
    for case in cases:
        for engine, train in ENGINES.items():
            missing = [seed for seed in range(seeds) if store.get(case, engine, seed) is None]
            if not missing:
                continue
            shard_set = open_or_pack(document(task, case, missing[0], work, source, engine, epochs=1.0))
            epochs = steps * GLOBAL_BATCH / len(shard_set.split("train"))
            configs = [document(task, case, seed, work, source, engine, epochs) for seed in missing]
            weights = [work / "weights" / f"{task.name}-{seed}" / "model.safetensors" for seed in missing]
            inputs = [prepare_input(c, shard_set, steps, w) for c, w in zip(configs, weights, strict=True)]
            for seed, result in zip(missing, train(configs[0], inputs), strict=True):
                store.put(case, engine, seed, result)
            print(f"{case.name}, {engine}: {len(missing)} trained", flush=True)


def main() -> None:
    parser = Options(__doc__)
    parser.add_size("task", full="digits", small="tiny", nargs="?", choices=[*TASKS, TINY.name])
    parser.add_argument("--source", help="archive of the photographs")
    parser.add_argument("--work", type=Path, help="folder of shards and results")
    parser.add_size("--seeds", full=5, small=2, type=int)
    parser.add_size("--steps", full=50, small=2, type=int, help="steps of a training")
    names = [case.name for case in CASES]
    parser.add_size("--cases", full=names, small=["lars-1-sharded"], nargs="+", choices=names, help="rows of the table")
    options = parser.read()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    task = TINY if options.task == TINY.name else TASKS[options.task]
    source = options.source or task.source
    if source is None:
        parser.error("--source: missing for photographs. Give their archive.")
    if options.work is None and not options.small:
        parser.error("--work: missing. Give a folder for shards and results; a stopped command resumes from it.")
    command = f"OMP_NUM_THREADS=1 python -m benchmarks.parity {task.name} --seeds {options.seeds}"
    command += f" --steps {options.steps} --work FOLDER"
    if task.source is None:
        command += f" --source {Path(source).name}"
    if options.cases != names:
        command += f" --cases {' '.join(options.cases)}"
    page = head(f"The two engines: {task.title}", ("jax", "torch", "numpy"), command)
    cases = [case for case in CASES if case.name in options.cases]
    with tempfile.TemporaryDirectory() as scratch:
        work = (options.work or Path(scratch)).resolve()
        store = ResultStore(work, task.name, options.steps, "small" if options.small else code_version())
        train_missing(task, cases, options.seeds, options.steps, work, source, store)
        results = {
            case: {engine: [store.get(case, engine, seed) for seed in range(options.seeds)] for engine in ENGINES}
            for case in cases
        }
    write_results(options.results, f"parity-{task.name}.md", [*page, *table(results)])


if __name__ == "__main__":
    main()
