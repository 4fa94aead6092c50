"""Commands that carry out a run here: the whole pipeline, or one stage in this process."""

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
def run(
    document: Run = None,
    changes: Set = [],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and start nothing.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Move a former run of this id aside and start anew.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show what kfp and the stages print.")] = False,
    runner: Annotated[
        str, typer.Option(metavar="process|docker", help="docker: each stage in a container of launch.image.")
    ] = "process",
) -> None:
    """The whole pipeline here: shard, train, evaluate, report. The same command again continues."""
    from podscale.cli.run import run_local_pipeline

    raise typer.Exit(
        run_local_pipeline(document, changes, runner=runner, dry_run=dry_run, fresh=fresh, verbose=verbose)
    )


@app.command()
def shard(
    document: Run = None,
    changes: Set = [],
    workers: Annotated[int, typer.Option(help="Packing processes; 0 = as the document says.", min=0)] = 0,
    index: Annotated[int, typer.Option("--index", help="This pod's part, from 0.", min=0)] = 0,
    of: Annotated[int, typer.Option("--of", help="Number of parts.", min=1)] = 1,
    verify: Annotated[bool, typer.Option("--verify", help="Read every shard again and check its hash.")] = False,
    inspect: Annotated[
        Path | None,
        typer.Option("--inspect", metavar="DIR", help="Tell what a shard set holds instead of making one."),
    ] = None,
    contact_sheet: Annotated[
        Path | None,
        typer.Option("--contact-sheet", metavar="FOLDER", help="With --inspect: a picture of each split, to look at."),
    ] = None,
    dedup: Annotated[str | None, typer.Option(help="Short for --set data.dedup=...")] = None,
    resize_short: Annotated[int | None, typer.Option(help="Short for --set data.resize_short=...")] = None,
    quality: Annotated[int | None, typer.Option(help="Short for --set data.quality=...")] = None,
    json: Json = False,
) -> None:
    """Stage 1: images to a shard set. Finished shards are not made again."""
    from podscale.config.preflight import preflight
    from podscale.kubernetes.termination_message import write_termination_on_exit
    from podscale.runs.stage_outcomes import ShardPart
    from podscale.stages import local

    if inspect is not None:
        _inspect(inspect, verify=verify, contact_sheets=contact_sheet, as_json=json)
        return
    if contact_sheet is not None or json:
        raise InputError("these go with --inspect DIR", field="--contact-sheet, --json")
    short = {"data.dedup": dedup, "data.resize_short": resize_short, "data.quality": quality}
    changes = [*changes, *(f"{name}={value}" for name, value in short.items() if value is not None)]
    with write_termination_on_exit("shard"):
        if index >= of:
            raise InputError(f"parts of --of {of} are counted from 0 to {of - 1}", field="--index", got=index)
        config = load_run_document(document, changes)
        preflight(config, local.preflight_target())
        progress = ProgressLine(sys.stderr)
        result = local.shard(
            config.data,
            config.run.workspace,
            ShardPart(index, of),
            workers=workers or config.launch.shard_workers,
            verify=verify,
            progress=progress,
            telemetry=local.ExportedTelemetry.for_config(config),
        )
        progress.clear()
        if result is None:
            print(f"part {index} of {of} is done; the part that ends last completes the set")
            return
        _print_shard_set(result)


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
    """Stage 2: train on a finished shard set, or continue an interrupted training."""
    from podscale.kubernetes.termination_message import write_termination_on_exit
    from podscale.runs import RunDirectory
    from podscale.stages import local

    changes = [*changes, *([f"checkpoint.resume={resume}"] if resume is not None else [])]
    with write_termination_on_exit("train"):
        config, location = _load_with_shard_set(document, changes, shard_set)
        _print_outcome(config, local.train(config, location), RunDirectory.for_config(config).model)


@app.command()
def collapse(
    document: Run = None,
    changes: Set = [],
    cycle: Annotated[
        list[int], typer.Option(metavar="K", help="The snapshot of this cycle alone, from 0; may be repeated.", min=0)
    ] = [],
    shard_set: ShardSetLocation = None,
) -> None:
    """Train the members of an ensemble from the snapshots that its run kept, each a run of its own."""
    from podscale.kubernetes.termination_message import write_termination_on_exit
    from podscale.runs import dataset_directory, ensemble_members, stage_outcomes
    from podscale.stages import local

    with write_termination_on_exit("train"):
        config = load_run_document(document, changes)
        chosen = [ensemble_members.ensemble_member(config, one) for one in cycle]
        chosen = chosen or ensemble_members.ensemble_members(config)
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


@app.command()
def evaluate(
    documents: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN|MODEL...",
            help="A run document; or two models and more, as directories of runs or of models, to evaluate together.",
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
        found = read_evaluation(path)
        if found.ensemble is not None:
            print(ensemble_text_table(found.ensemble), end="\n\n")
        for name, value in _scores_text(found).items():
            print(f"{name:<10} {value}")
        _print_outcome(config, outcome, path)


@app.command()
def report(document: Run = None, changes: Set = [], shard_set: ShardSetLocation = None) -> None:
    """Stage 4: write report.html and the model card."""
    from podscale.kubernetes.termination_message import write_termination_on_exit
    from podscale.runs import RunDirectory
    from podscale.stages import local

    with write_termination_on_exit("report"):
        config, location = _load_with_shard_set(document, changes, shard_set)
        _print_outcome(config, local.report(config, location), RunDirectory.for_config(config).report)


def _print_shard_set(result: "ShardResult") -> None:
    for note in result.messages:
        print(note)
    for name, split in result.manifest.splits.items():
        images, shards = format_count(split.count, "image"), format_count(len(split.shards), "shard")
        print(f"{name}: {images} in {shards}, {format_bytes(split.bytes)}")
    rejects = sum(result.manifest.rejects.values())
    if rejects:
        print(f"{format_count(rejects, 'unusable image')}, listed in {result.location}/rejects.jsonl")
    print(f"{result.location}{' (was complete before)' if result.reused else ''}")


def _inspect(directory: Path, *, verify: bool, contact_sheets: Path | None, as_json: bool) -> None:
    """Print what a shard set holds; fail if verifying finds damage. contact_sheets: folder for pictures."""
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


def _load_with_shard_set(
    document: str | None, changes: Sequence[str], shard_set: str | None
) -> "tuple[RunConfig, str]":
    """Return the document and the location of its shards: as given, else the set that `podscale shard` makes."""
    from podscale.runs import dataset_directory, stage_outcomes

    config = load_run_document(document, changes)
    stage_outcomes.check_run_document(config)
    return config, shard_set or dataset_directory(config.run.workspace, config.data)


def _load_to_evaluate(
    documents: Sequence[str], changes: Sequence[str], shard_set: str | None
) -> "tuple[RunConfig, str]":
    """Return the document to evaluate, if need be one made of several models, and the location of its shards."""
    from podscale.runs import dataset_directory, stage_outcomes

    if any(Path(name).is_dir() for name in documents):
        config = adhoc_ensemble_document(documents, changes, shard_set)
        location = shard_set or dataset_directory(config.run.workspace, config.data)
        stage_outcomes.check_run_document(config)
        return config, location
    if len(documents) > 1:
        missing = next(name for name in documents if not Path(name).is_dir())
        hint = "Name a model by its directory or by that of its run."
        raise InputError("there is no such directory", field=missing, hint=hint)
    return _load_with_shard_set(documents[0] if documents else None, changes, shard_set)


def _scores_text(evaluation: "Evaluation") -> dict[str, str]:
    """Return the main scores as text."""
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


def _print_outcome(config: "RunConfig", outcome: "StageOutcome", product: Path) -> None:
    how = "was finished before, nothing to do" if outcome.reused else f"done in {outcome.seconds:.1f} s"
    print(f"{outcome.stage} of run {config.run.id}: {how}: {product}", file=sys.stderr)


def adhoc_ensemble_document(names: Sequence[str], changes: Sequence[str], shard_set: str | None) -> "RunConfig":
    """Build the document of several models that are evaluated together: a run without a training of its own.

    It lies in the workspace of the first model's run, and its other options come from that run's document. For a
    model outside of a run directory they come from model.json, and the shard set must be given.
    Raises InputError for fewer than two models.
    """
    from podscale.config import dumps, fingerprint, loads
    from podscale.config.ensemble import EnsembleSection, StartSection
    from podscale.config.run import ClaimSection

    if len(names) < 2:
        raise InputError(
            "an ensemble of one is a single model",
            field=names[0],
            hint="Name two models or more, or a run document to evaluate the model of a run.",
        )
    directories = [_resolve_model(Path(name)) for name in names]
    first = _training_document(directories[0], shard_set)
    paths = [str(directory) for directory in directories]
    identity = first.run.model_copy(update={"id": f"together-{fingerprint({'models': paths})[:8]}"})
    train = first.train.model_copy(update={"phases": (), "start_from": StartSection(), "target_top1": None})
    config = first.model_copy(
        update={
            "run": identity,
            "train": train,
            "ensemble": EnsembleSection(),
            "evaluate": first.evaluate.model_copy(update={"models": tuple(paths), "weights": "trained"}),
            "checkpoint": first.checkpoint.model_copy(update={"snapshots": ()}),
            "telemetry": first.telemetry.model_copy(update={"mlperf_log": False}),
            "claim": ClaimSection(),
        }
    )
    return loads(dumps(config), " ".join(names), changes)


def _resolve_model(path: Path) -> Path:
    from podscale.runs.ensemble_members import MODEL_JSON

    return path if (path / MODEL_JSON).exists() or not (path / "model").is_dir() else path / "model"


def _training_document(directory: Path, shard_set: str | None) -> "RunConfig":
    from podscale.config import RunConfig, load
    from podscale.runs import RunDirectory
    from podscale.runs.model_files import read_model

    run = RunDirectory(directory.resolve().parent)
    if directory.name == "model" and run.config.exists():
        return load(run.config)
    if shard_set is None:
        raise InputError(
            "this model lies outside of a run directory, so nothing names the images it is for",
            field=str(directory),
            hint="Name them with --shard-set",
        )
    told = read_model(directory).description
    prepared = told["preprocessing"]
    values = {
        "input": {"image_size": prepared["image_size"], "mean": prepared["mean"], "std": prepared["std"]},
        "model": told["architecture"],
        "evaluate": {"crop_fraction": prepared["crop_fraction"]},
    }
    return RunConfig.model_validate(values)
