"""Commands that carry out a run here: the whole pipeline, or one stage."""

from pathlib import Path
from typing import Annotated

import typer

from podscale.cli.options import Json, Run, Set, ShardSetLocation, complete_run
from podscale.errors import InputError

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
    from podscale.commands import stage

    if inspect is not None:
        return stage.run_inspect(inspect, verify=verify, contact_sheets=contact_sheet, as_json=json)
    if contact_sheet is not None or json:
        raise InputError("these go with --inspect DIR", field="--contact-sheet, --json")
    short = {"data.dedup": dedup, "data.resize_short": resize_short, "data.quality": quality}
    changes = [*changes, *(f"{name}={value}" for name, value in short.items() if value is not None)]
    return stage.run_shard(document, changes, workers=workers, index=index, of=of, verify=verify)


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
    from podscale.commands import stage

    stage.run_train(document, [*changes, *([f"checkpoint.resume={resume}"] if resume is not None else [])], shard_set)


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
    from podscale.commands import stage

    stage.run_collapse(document, changes, shard_set, cycle)


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
    from podscale.commands import stage

    stage.run_evaluate(documents or [], changes, shard_set)


@app.command()
def report(document: Run = None, changes: Set = [], shard_set: ShardSetLocation = None) -> None:
    """Stage 4: write report.html and the model card."""
    from podscale.commands import stage

    stage.run_report(document, changes, shard_set)
