"""Commands that carry out one stage alone, in this process."""

import sys
from collections.abc import Sequence
from pathlib import Path

from podscale import resume, stages
from podscale.commands.documents import load
from podscale.config import RunConfig
from podscale.config.preflight import preflight
from podscale.errors import InputError
from podscale.rundir import Outcome, RunDirectory, dataset_directory
from podscale.terminal import ProgressLine
from podscale.text import count, human_bytes


def shard(document: str | None, changes: Sequence[str], *, workers: int, index: int, of: int, verify: bool) -> None:
    """Makes the shard set of a document and tells what it holds."""
    if index >= of:
        raise InputError(f"--index {index} --of {of}: parts are counted from 0 to {of - 1}")
    config = load(document, changes)
    preflight(config, "here")
    progress = ProgressLine(sys.stderr)
    result = stages.shard(
        config.data,
        config.run.workspace,
        workers=workers or config.launch.shard_workers,
        index=index,
        of=of,
        verify=verify,
        progress=progress,
    )
    progress.clear()
    if result is None:
        print(f"part {index} of {of} is done; the part that ends last completes the set")
        return
    for note in result.notes:
        print(note)
    for name, split in result.manifest.splits.items():
        print(
            f"{name}: {count(split.count, 'image')} in {count(len(split.shards), 'shard')}, {human_bytes(split.bytes)}"
        )
    rejects = sum(result.manifest.rejects.values())
    if rejects:
        print(f"{count(rejects, 'unusable image')}, listed in {result.location}/rejects.jsonl")
    print(f"{result.location}{' (was complete before)' if result.reused else ''}")


def inspect(directory: Path, *, verify: bool, as_json: bool) -> None:
    """Tells what a shard set holds."""
    from podscale.shards import inspect as look

    summary = look.inspect(directory, verify=verify)
    print(summary.to_json() if as_json else summary.to_text())


def train(document: str | None, changes: Sequence[str]) -> None:
    """Trains on the document's shard set, which must be complete."""
    config, shard_set = _ready(document, changes)
    _tell(config, stages.train(config, shard_set), RunDirectory.of(config).model)


def evaluate(document: str | None, changes: Sequence[str]) -> None:
    """Evaluates the trained model and prints its figures."""
    from podscale.evaluate import evaluation as evaluations

    config, shard_set = _ready(document, changes)
    outcome = stages.evaluate(config, shard_set)
    for name, value in evaluations.kfp_metrics(evaluations.read(RunDirectory.of(config).evaluation)).items():
        print(f"{name}: {value:.4f}")
    _tell(config, outcome, RunDirectory.of(config).evaluation)


def report(document: str | None, changes: Sequence[str]) -> None:
    """Writes the report."""
    config, shard_set = _ready(document, changes)
    _tell(config, stages.report(config, shard_set), RunDirectory.of(config).report)


def _ready(document: str | None, changes: Sequence[str]) -> tuple[RunConfig, str]:
    config = load(document, changes)
    resume.refuse_other_document(config)
    return config, dataset_directory(config.run.workspace, config.data)


def _tell(config: RunConfig, outcome: Outcome, product: Path) -> None:
    how = "was finished before, nothing to do" if outcome.reused else f"done in {outcome.seconds:.1f} s"
    print(f"{outcome.stage} of run {config.run.id}: {how}: {product}", file=sys.stderr)
