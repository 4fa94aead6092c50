"""Commands that carry out one stage alone, in this process."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from podscale.commands.documents import load_run_document
from podscale.commands.several import adhoc_ensemble_document
from podscale.config import RunConfig
from podscale.config.preflight import preflight
from podscale.errors import InputError, PodscaleError
from podscale.kubernetes import termination_message
from podscale.runs import RunDirectory, StageOutcome, dataset_directory, ensemble_members, stage_outcomes
from podscale.stages import local
from podscale.util.formatting import format_bytes, format_count
from podscale.util.terminal import ProgressLine

if TYPE_CHECKING:
    from podscale.evaluation.evaluation_json import Evaluation


@termination_message.write_termination_on_exit("shard")
def run_shard(document: str | None, changes: Sequence[str], *, workers: int, index: int, of: int, verify: bool) -> None:
    """Makes the shard set of a document and tells what it holds."""
    if index >= of:
        raise InputError(f"parts of --of {of} are counted from 0 to {of - 1}", field="--index", got=index)
    config = load_run_document(document, changes)
    preflight(config, local.preflight_target())
    progress = ProgressLine(sys.stderr)
    result = local.shard(
        config.data,
        config.run.workspace,
        workers=workers or config.launch.shard_workers,
        index=index,
        of=of,
        verify=verify,
        progress=progress,
        telemetry=local.ExportedTelemetry.for_config(config),
    )
    progress.clear()
    if result is None:
        print(f"part {index} of {of} is done; the part that ends last completes the set")
        return
    for note in result.messages:
        print(note)
    for name, split in result.manifest.splits.items():
        print(
            f"{name}: {format_count(split.count, 'image')} in {format_count(len(split.shards), 'shard')}, {format_bytes(split.bytes)}"
        )
    rejects = sum(result.manifest.rejects.values())
    if rejects:
        print(f"{format_count(rejects, 'unusable image')}, listed in {result.location}/rejects.jsonl")
    print(f"{result.location}{' (was complete before)' if result.reused else ''}")


def run_inspect(directory: Path, *, verify: bool, contact_sheets: Path | None, as_json: bool) -> None:
    """Tells what a shard set holds; fails where verifying finds damage. contact_sheets: folder for pictures."""
    from podscale.data.inspect import inspect_shard_set

    progress = ProgressLine(sys.stderr)
    summary = inspect_shard_set(directory, verify=verify, progress=progress)
    progress.clear()
    print(summary.to_json() if as_json else summary.to_text())
    for path in _contact_sheets(directory, list(summary.splits), contact_sheets) if contact_sheets else ():
        print(path, file=sys.stderr)
    if summary.damage:
        raise PodscaleError(
            format_count(len(summary.damage), "damaged file"),
            field=str(directory),
            hint="Delete the folder and run `podscale shard`",
        )


def _contact_sheets(directory: Path, splits: list[str], folder: Path) -> list[Path]:
    from podscale.data.inspect import contact_sheet

    try:
        folder.mkdir(parents=True, exist_ok=True)
        return [contact_sheet(directory, split, folder / f"{split}.png") for split in splits]
    except OSError as error:
        problem = f"cannot write the contact sheet: {error.strerror}"
        raise InputError(problem, field=str(error.filename or folder)) from error


@termination_message.write_termination_on_exit("train")
def run_train(document: str | None, changes: Sequence[str], shard_set: str | None = None) -> None:
    """Trains on the document's shard set, which must be complete."""
    config, location = _load_with_shard_set(document, changes, shard_set)
    _print_outcome(config, local.train(config, location), RunDirectory.for_config(config).model)


@termination_message.write_termination_on_exit("train")
def run_collapse(document: str | None, changes: Sequence[str], shard_set: str | None, cycles: Sequence[int]) -> None:
    """Trains the members of a document's ensemble, each from its snapshot; cycles: those alone, default all."""
    config = load_run_document(document, changes)
    chosen = [ensemble_members.ensemble_member(config, cycle) for cycle in cycles] or ensemble_members.ensemble_members(
        config
    )
    if not chosen:
        raise InputError(
            f"run {config.run.id} has nothing to collapse",
            field="ensemble",
            hint="Give the document an ensemble section with cycles.",
        )
    location = shard_set or dataset_directory(config.run.workspace, config.data)
    for member in chosen:
        stage_outcomes.check_run_document(member.config)
        _print_outcome(member.config, local.train(member.config, location), member.model)


@termination_message.write_termination_on_exit("evaluate")
def run_evaluate(documents: Sequence[str], changes: Sequence[str], shard_set: str | None = None) -> None:
    """Evaluates the trained model, or several together, and prints the figures."""
    from podscale.evaluation.evaluation_json import read_evaluation
    from podscale.report.sections.ensemble import ensemble_text_table

    if any(Path(name).is_dir() for name in documents):
        config = adhoc_ensemble_document(documents, changes, shard_set)
        location = shard_set or dataset_directory(config.run.workspace, config.data)
        stage_outcomes.check_run_document(config)
    elif len(documents) > 1:
        missing = next(name for name in documents if not Path(name).is_dir())
        hint = "Name a model by its directory or by that of its run."
        raise InputError("there is no such directory", field=missing, hint=hint)
    else:
        config, location = _load_with_shard_set(documents[0] if documents else None, changes, shard_set)
    outcome = local.evaluate(config, location)
    found = read_evaluation(RunDirectory.for_config(config).evaluation)
    if found.ensemble is not None:
        print(ensemble_text_table(found.ensemble), end="\n\n")
    for name, value in _scores_text(found).items():
        print(f"{name:<10} {value}")
    _print_outcome(config, outcome, RunDirectory.for_config(config).evaluation)


@termination_message.write_termination_on_exit("report")
def run_report(document: str | None, changes: Sequence[str], shard_set: str | None = None) -> None:
    """Writes the report."""
    config, location = _load_with_shard_set(document, changes, shard_set)
    _print_outcome(config, local.report(config, location), RunDirectory.for_config(config).report)


def _load_with_shard_set(document: str | None, changes: Sequence[str], shard_set: str | None) -> tuple[RunConfig, str]:
    """The document and the location of its shards: as given, else the set that `podscale shard` makes."""
    config = load_run_document(document, changes)
    stage_outcomes.check_run_document(config)
    return config, shard_set or dataset_directory(config.run.workspace, config.data)


def _scores_text(evaluation: "Evaluation") -> dict[str, str]:
    """The figures people ask for first, as text."""
    figures, rate = evaluation.figures, evaluation.throughput.evaluation_images_per_second
    low, high = figures.top1_interval
    rows = {
        "top-1": f"{figures.top1:.2%}  (95 % interval {low:.2%} to {high:.2%})",
        f"top-{figures.top5_k}": f"{figures.top5:.2%}",
        "loss": "not finite" if figures.loss is None else f"{figures.loss:.4f} nats",
        "ECE": "not finite" if figures.ece is None else f"{figures.ece:.2%}",
        "images": f"{figures.samples:,}",
    }
    return {**rows, "speed": f"{rate:,.0f} images/s"} if rate else rows


def _print_outcome(config: RunConfig, outcome: StageOutcome, product: Path) -> None:
    how = "was finished before, nothing to do" if outcome.reused else f"done in {outcome.seconds:.1f} s"
    print(f"{outcome.stage} of run {config.run.id}: {how}: {product}", file=sys.stderr)
