"""Arguments and options that more than one command takes, each written once."""

from pathlib import Path
from typing import Annotated

import typer


def complete_run(incomplete: str) -> list[str]:
    """What a shell offers for RUN: presets, run documents here, and folders on the way to others."""
    from podscale.pipelines import presets

    files = [str(path) for path in Path().glob(f"{incomplete}*") if path.suffix in (".yaml", ".yml") or path.is_dir()]
    return [name for name in presets.preset_names() if name.startswith(incomplete)] + files


def complete_option(incomplete: str) -> list[str]:
    """What a shell offers for --set."""
    from podscale.config import option_names

    return [f"{name}=" for name in option_names() if name.startswith(incomplete)]


Run = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN",
        help="Run document: a path or a preset's name (see `podscale presets`).",
        autocompletion=complete_run,
    ),
]
Set = Annotated[
    list[str],
    typer.Option(
        "--set", "-s", metavar="A.B=C", help="Change one option; may be repeated.", autocompletion=complete_option
    ),
]
ShardSetLocation = Annotated[
    str | None,
    typer.Option(metavar="LOCATION", help="Read this shard set (a directory or fsspec URL) instead of the document's."),
]
Kfp = Annotated[str, typer.Option(help="Oldest KFP that must accept the package: 2.15, or 2.16 and newer.")]
_from_defaults = typer.Option(
    "--defaults",
    metavar="FILE|cluster",
    help="Options that hold where the document says nothing; cluster: what the chart left in the namespace.",
)
Defaults = Annotated[str | None, _from_defaults]
ClusterDefaults = Annotated[str, _from_defaults]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Namespace = Annotated[str | None, typer.Option("--namespace", "-n", help="Short for launch.cluster.namespace.")]
Context = Annotated[str | None, typer.Option(help="Short for launch.cluster.context (of the kubeconfig).")]
ClientCertificate = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="PEM file of a certificate, for metrics endpoints that want one (mTLS)."),
]
ClientKey = Annotated[Path | None, typer.Option(metavar="FILE", help="PEM file of that certificate's key.")]
