"""Commands that hand the pipeline of a run document to Kubeflow Pipelines."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from podscale import env
from podscale.cli.groups import grouped
from podscale.cli.options import Defaults, Json, Kfp, Run, Set

if TYPE_CHECKING:
    from podscale.pipelines.endpoint import Endpoint

app = typer.Typer(help="Hand the pipeline of a run document to Kubeflow Pipelines.", no_args_is_help=True)


@dataclass(frozen=True)
class Place:
    """Where the backend is, and how to get in."""

    host: Annotated[
        str | None, typer.Option(metavar="URL", help="KFP's API or user interface; else KF_PIPELINES_ENDPOINT.")
    ] = None
    namespace: Annotated[str, typer.Option("--namespace", "-n", help="Yours, where several users share the KFP.")] = ""
    ui: Annotated[str | None, typer.Option(metavar="URL", help="User interface for the links; default: the host.")] = (
        None
    )
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help=f"Bearer token; else {env.KFP_TOKEN} or _COOKIES.")
    ] = None
    ca_file: Annotated[Path | None, typer.Option(metavar="FILE", help="Certificate authority of the host (PEM).")] = (
        None
    )

    def endpoint(self) -> "Endpoint":
        """What was named, with what the environment says of the rest."""
        from podscale.pipelines.endpoint import endpoint

        return endpoint(**vars(self))


@dataclass(frozen=True)
class Package:
    """What is sent."""

    pipeline: Annotated[str, typer.Option(help="Name of the pipeline that gets a new version.")] = "podscale-training"
    defaults: Defaults = None
    cache: Annotated[
        bool, typer.Option("--cache/--no-cache", help="KFP may reuse the shard stage's former result.")
    ] = True
    kfp: Kfp = "2.16"


@dataclass(frozen=True)
class Start:
    """What is started."""

    experiment: Annotated[str, typer.Option(help="Experiment that the run belongs to.")] = "podscale"
    name: Annotated[str | None, typer.Option(help="Name to show; default: run.id.")] = None
    service_account: Annotated[
        str | None, typer.Option(metavar="NAME", help="Service account of the tasks; default: KFP's own.")
    ] = None


@app.command()
@grouped
def upload(document: Run = None, changes: Set = [], *, place: Place, package: Package, json: Json = False) -> None:
    """Make the package of a run document the newest version of a pipeline; the same package is sent once."""
    from podscale.commands import pipeline as command

    command.upload(command.What(document, changes, **vars(package)), place.endpoint(), as_json=json)


@app.command()
@grouped
def run(
    document: Run = None,
    changes: Set = [],
    *,
    place: Place,
    package: Package,
    start: Start,
    wait: Annotated[bool, typer.Option("--wait", help="Show the stages as they go; fail where the run fails.")] = False,
    json: Json = False,
) -> None:
    """Upload, and start a run. Interrupting --wait leaves the run at work."""
    from podscale.commands import pipeline as command

    what = command.What(document, changes, **vars(package), **vars(start))
    raise typer.Exit(command.run(what, place.endpoint(), wait=wait, as_json=json))


@app.command()
@grouped
def schedule(
    cron: Annotated[str, typer.Option(metavar="'M H D M W'", help="When, in UTC: five fields, or six with seconds.")],
    document: Run = None,
    changes: Set = [],
    *,
    place: Place,
    package: Package,
    start: Start,
    replace: Annotated[bool, typer.Option("--replace", help="Take the place of a schedule of this name.")] = False,
    json: Json = False,
) -> None:
    """Upload, and start a run at every time of a cron expression; each is named <run.id>-<time>."""
    from podscale.commands import pipeline as command

    what = command.What(document, changes, **vars(package), **vars(start))
    command.schedule(what, place.endpoint(), cron=cron, replace=replace, as_json=json)
