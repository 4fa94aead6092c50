"""Commands of the stages, each in this process: `shard`, `train`, `collapse`, `evaluate`, `report`."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from podscale.cli.documents import load_run_document
from podscale.cli.options import Json, Run, Set, ShardSetLocation, complete_run
from podscale.errors import InputError, PodscaleError
from podscale.util.formatting import format_bytes, format_count
from podscale.util.terminal import ProgressLine

if TYPE_CHECKING:
    from podscale.config import RunConfig
    from podscale.evaluation.evaluation_json import Evaluation
    from podscale.runs import StageOutcome
    from podscale.stages.local import ShardResult

app = typer.Typer()


@app.command()
def shard(
    document: Run = None,
    changes: Set = [],
    workers: Annotated[int, typer.Option(help="Packing processes; 0 = launch.shard_workers.", min=0)] = 0,
    index: Annotated[int, typer.Option("--index", help="Index of this pod's part, from 0.", min=0)] = 0,
    of: Annotated[int, typer.Option("--of", help="Number of parts.", min=1)] = 1,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify", help="Read every shard again and check its hash; with --inspect its decode index too."
        ),
    ] = False,
    inspect: Annotated[
        Path | None,
        typer.Option("--inspect", metavar="DIR", help="Print the contents of a shard set instead of building one."),
    ] = None,
    contact_sheet: Annotated[
        Path | None,
        typer.Option(
            "--contact-sheet", metavar="FOLDER", help="With --inspect: write a picture of each split's images."
        ),
    ] = None,
    decode_index: Annotated[
        bool,
        typer.Option(
            "--decode-index",
            help="Also write the missing decode indexes of a set that was complete before, and with --verify those "
            "that are damaged.",
        ),
    ] = False,
    dedup: Annotated[str | None, typer.Option(help="Short for --set data.dedup=...")] = None,
    resize_short: Annotated[int | None, typer.Option(help="Short for --set data.resize_short=...")] = None,
    quality: Annotated[int | None, typer.Option(help="Short for --set data.quality=...")] = None,
    json: Json = False,
) -> None:
    """Stage 1: pack images into a shard set. Finished shards are not packed again."""
    from podscale.api.stages import shard_part
    from podscale.data.manifest import ShardPart
    from podscale.kubernetes.termination_message import write_termination_on_exit

    if inspect is not None:
        _inspect(inspect, verify=verify, contact_sheets=contact_sheet, as_json=json)
        return
    if contact_sheet is not None or json:
        raise InputError("these need --inspect DIR", field="--contact-sheet, --json")
    shortcuts = {"data.dedup": dedup, "data.resize_short": resize_short, "data.quality": quality}
    changes = [*changes, *(f"{name}={value}" for name, value in shortcuts.items() if value is not None)]
    with write_termination_on_exit("shard"):
        if index >= of:
            raise InputError(f"parts of --of {of} are counted from 0 to {of - 1}", field="--index", got=index)
        config = load_run_document(document, changes)
        progress = ProgressLine(sys.stderr)
        result = shard_part(config, ShardPart(index, of), workers=workers, verify=verify, progress=progress)
        progress.clear()
        if result is None:
            print(f"part {index} of {of} is done; the last part to finish completes the set")
            return
        _print_shard_set(result)
        if decode_index:
            _index_shards(config, result, workers or config.launch.shard_workers, verify=verify)


@app.command()
def train(
    document: Run = None,
    changes: Set = [],
    resume: Annotated[
        str | None,
        typer.Option(metavar="auto|never|DIR", help="Short for --set checkpoint.resume=..."),
    ] = None,
    shard_set: ShardSetLocation = None,
) -> None:
    """Stage 2: train on a finished shard set, or resume an interrupted training."""
    from podscale.api.stages import load_with_shard_set
    from podscale.kubernetes.termination_message import write_termination_on_exit
    from podscale.runs import RunDirectory
    from podscale.stages import local

    changes = [*changes, *([f"checkpoint.resume={resume}"] if resume is not None else [])]
    with write_termination_on_exit("train"):
        config, location = load_with_shard_set(load_run_document(document, changes), shard_set=shard_set)
        _print_outcome(config, local.train(config, location), RunDirectory.for_config(config).model)


@app.command()
def collapse(
    document: Run = None,
    changes: Set = [],
    cycle: Annotated[
        list[int],
        typer.Option(metavar="K", help="Only from the snapshot of this cycle, from 0; may be repeated.", min=0),
    ] = [],
    shard_set: ShardSetLocation = None,
) -> None:
    """Train the members of an ensemble, each as a run of its own, from the snapshots that its run kept."""
    from podscale.kubernetes.termination_message import write_termination_on_exit
    from podscale.runs import dataset_directory, ensemble_members, stage_outcomes
    from podscale.stages import local

    with write_termination_on_exit("train"):
        config = load_run_document(document, changes)
        members = [ensemble_members.ensemble_member(config, number) for number in cycle]
        members = members or ensemble_members.ensemble_members(config)
        if not members:
            raise InputError(
                f"run {config.run.id} has nothing to collapse",
                field="ensemble",
                hint="Give the document an ensemble section with cycles.",
            )
        location = shard_set or dataset_directory(config.run.workspace, config.data)
        for member in members:
            stage_outcomes.check_run_document(member.config)
            _print_outcome(member.config, local.train(member.config, location), member.model)


@app.command()
def evaluate(
    documents: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN|MODEL...",
            help="Run document, or two or more directories of runs or models to evaluate together.",
            autocompletion=complete_run,
        ),
    ] = None,
    changes: Set = [],
    shard_set: ShardSetLocation = None,
) -> None:
    """Stage 3: evaluate the trained model on every validation image, or several models together."""
    from podscale.evaluation.evaluation_json import read_evaluation
    from podscale.kubernetes.termination_message import write_termination_on_exit
    from podscale.report.sections.ensemble import ensemble_text_table
    from podscale.runs import RunDirectory
    from podscale.stages import local

    with write_termination_on_exit("evaluate"):
        config, location = _load_to_evaluate(documents or [], changes, shard_set)
        outcome = local.evaluate(config, location)
        path = RunDirectory.for_config(config).evaluation
        evaluation = read_evaluation(path)
        if evaluation.ensemble is not None:
            print(ensemble_text_table(evaluation.ensemble), end="\n\n")
        for name, value in _format_scores(evaluation).items():
            print(f"{name:<10} {value}")
        _print_outcome(config, outcome, path)


@app.command()
def report(document: Run = None, changes: Set = [], shard_set: ShardSetLocation = None) -> None:
    """Stage 4: write report.html and the model card."""
    from podscale.api.stages import load_with_shard_set
    from podscale.kubernetes.termination_message import write_termination_on_exit
    from podscale.runs import RunDirectory
    from podscale.stages import local

    with write_termination_on_exit("report"):
        config, location = load_with_shard_set(load_run_document(document, changes), shard_set=shard_set)
        _print_outcome(config, local.report(config, location), RunDirectory.for_config(config).report)


def _print_shard_set(result: "ShardResult") -> None:
    for message in result.messages:
        print(message)
    for name, split in result.manifest.splits.items():
        images, shards = format_count(split.count, "image"), format_count(len(split.shards), "shard")
        print(f"{name}: {images} in {shards}, {format_bytes(split.bytes)}")
    rejects = sum(result.manifest.rejects.values())
    if rejects:
        print(f"{format_count(rejects, 'unusable image')}, listed in {result.location}/rejects.jsonl")
    print(f"{result.location}{' (was complete before)' if result.reused else ''}")


def _index_shards(config: "RunConfig", result: "ShardResult", workers: int, *, verify: bool) -> None:
    """Write the missing decode indexes of a set, with `verify` the damaged ones too, and print their size."""
    from podscale.data.sharding.decode_indexes import index_shards
    from podscale.runs import local_path

    if config.data.decode_index is None:
        raise InputError("the document wants no decode index", field="data.decode_index", hint="Set it to 8.")
    progress = ProgressLine(sys.stderr)
    directory, interval = local_path(result.location), config.data.decode_index
    indexed = index_shards(directory, interval, workers=workers, verify=verify, progress=progress)
    progress.clear()
    size = f"{format_bytes(indexed.index_bytes)}, {indexed.index_bytes / indexed.shard_bytes:.1%} of the shards"
    print(f"decode index: {size}; written for {indexed.written} of {format_count(indexed.shards, 'shard')}")


def _inspect(directory: Path, *, verify: bool, contact_sheets: Path | None, as_json: bool) -> None:
    """Print a summary of a shard set, and write contact sheets; raise PodscaleError if verifying finds damage.

    Unusable decode indexes are printed, and are no error: they only cost time.
    """
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


def _load_to_evaluate(
    documents: Sequence[str], changes: Sequence[str], shard_set: str | None
) -> "tuple[RunConfig, str]":
    """Return the document to evaluate (for several models, that of their ensemble) and the location of its shards."""
    from podscale.api.stages import load_ensemble, load_with_shard_set

    if len(documents) > 1 or any(Path(name).is_dir() for name in documents):
        return load_ensemble(documents, changes, shard_set)
    return load_with_shard_set(load_run_document(documents[0] if documents else None, changes), shard_set=shard_set)


def _format_scores(evaluation: "Evaluation") -> dict[str, str]:
    scores, rate = evaluation.scores, evaluation.throughput.evaluation_images_per_second
    low, high = scores.top1_interval
    rows = {
        "top-1": f"{scores.top1:.2%}  (95 % interval {low:.2%} to {high:.2%})",
        f"top-{scores.top5_k}": f"{scores.top5:.2%}",
        "loss": "not finite" if scores.loss is None else f"{scores.loss:.4f} nats",
        "ECE": "not finite" if scores.ece is None else f"{scores.ece:.2%}",
        "images": f"{scores.samples:,}",
    }
    return {**rows, "speed": f"{rate:,.0f} images/s"} if rate else rows


def _print_outcome(config: "RunConfig", outcome: "StageOutcome", product: Path) -> None:
    result = "was finished before, nothing to do" if outcome.reused else f"done in {outcome.seconds:.1f} s"
    print(f"{outcome.stage} of run {config.run.id}: {result}: {product}", file=sys.stderr)
