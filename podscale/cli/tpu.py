"""Commands about TPUs."""

from pathlib import Path
from typing import Annotated

import typer

from podscale.cli.options import Json, Run, Set

app = typer.Typer(help="What a run would be on TPUs that are not here.", no_args_is_help=True)


@app.command("compile")
def compile_step(
    document: Run = None,
    changes: Set = [],
    topology: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Chips of a slice, such as v5e:16x16; default: launch.hardware."),
    ] = None,
    slices: Annotated[
        int | None, typer.Option(help="Slices of that topology; default: launch.cluster.slices.", min=1)
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(metavar="batch", help="Find the largest batch that fits for certain: several compilations."),
    ] = None,
    cache: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of results; default: ~/.cache/podscale/tpu-compile.")
    ] = None,
    time_limit: Annotated[float, typer.Option(help="Seconds for one compilation.", min=1)] = 7200.0,
    json: Json = False,
) -> None:
    """Compile the training step with the real TPU compiler: memory, about the largest batch that fits, collectives,
    work, estimated speed. Takes minutes, and needs libtpu but no TPU."""
    from podscale.commands import tpu_compile

    tpu_compile.run_tpu_compile(
        document, changes, tpu_compile.CompileOptions(topology, slices, sweep, cache, time_limit, json)
    )
