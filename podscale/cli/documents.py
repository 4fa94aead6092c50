"""Commands about run documents: show one, compile one, list those that come with Podscale."""

from pathlib import Path
from typing import Annotated

import typer

from podscale.cli.options import Defaults, Json, Kfp, Run, Set

app = typer.Typer()


@app.command("config")
def show_config(
    document: Run = None,
    changes: Set = [],
    json: Json = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of run documents.")] = False,
    plot: Annotated[
        bool, typer.Option("--plot", help="Draw learning rate, momentum and weight decay over the run instead.")
    ] = False,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Write that drawing as an SVG file too.")] = None,
) -> None:
    """Print the resolved run document: every option with its value."""
    from podscale.commands import documents

    documents.show_document(document, changes, as_json=json, schema=schema, plot=plot, svg=svg)


@app.command("compile")
def compile_pipeline(
    document: Run = None,
    changes: Set = [],
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write.")] = Path("pipeline.yaml"),
    defaults: Defaults = None,
    kfp: Kfp = "2.16",
) -> None:
    """Compile the pipeline of a run document into a KFP package for a cluster."""
    from podscale.commands import documents

    documents.compile_package(document, changes, output, defaults=defaults, kfp=kfp)


@app.command()
def presets(json: Json = False) -> None:
    """List the run documents that come with Podscale."""
    from podscale.commands import documents

    documents.list_presets(as_json=json)
