"""Commands that hand the pipeline of a run document to Kubeflow Pipelines."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from podscale.cli.options import Defaults, Json, Kfp, Run, Set, expand_option_groups
from podscale.util import env

if TYPE_CHECKING:
    from podscale.pipelines.kfp_endpoint import KfpEndpoint


app = typer.Typer(help="Hand the pipeline of a run document to Kubeflow Pipelines.", no_args_is_help=True)


@dataclass(frozen=True)
class BackendOptions:
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

    def endpoint(self) -> "KfpEndpoint":
        """What was named, with what the environment says of the rest."""
        from podscale.pipelines.kfp_endpoint import resolve_endpoint

        return resolve_endpoint(**vars(self))


@dataclass(frozen=True)
class PackageOptions:
    """What is sent."""

    pipeline: Annotated[str, typer.Option(help="Name of the pipeline that gets a new version.")] = "podscale-training"
    defaults: Defaults = None
    cache: Annotated[
        bool, typer.Option("--cache/--no-cache", help="KFP may reuse the shard stage's former result.")
    ] = True
    kfp: Kfp = "2.16"


@dataclass(frozen=True)
class StartOptions:
    """What is started."""

    experiment: Annotated[str, typer.Option(help="Experiment that the run belongs to.")] = "podscale"
    name: Annotated[str | None, typer.Option(help="Name to show; default: run.id.")] = None
    service_account: Annotated[
        str | None, typer.Option(metavar="NAME", help="Service account of the tasks; default: KFP's own.")
    ] = None


@app.command()
@expand_option_groups
def upload(
    document: Run = None, changes: Set = [], *, place: BackendOptions, package: PackageOptions, json: Json = False
) -> None:
    """Make the package of a run document the newest version of a pipeline; the same package is sent once."""
    from podscale.commands.pipeline import PipelineRequest, upload_pipeline

    upload_pipeline(PipelineRequest(document, changes, **vars(package)), place.endpoint(), as_json=json)


@app.command()
@expand_option_groups
def run(
    document: Run = None,
    changes: Set = [],
    *,
    place: BackendOptions,
    package: PackageOptions,
    start: StartOptions,
    wait: Annotated[bool, typer.Option("--wait", help="Show the stages as they go; fail where the run fails.")] = False,
    json: Json = False,
) -> None:
    """Upload, and start a run. Interrupting --wait leaves the run at work."""
    from podscale.commands.pipeline import PipelineRequest, run_remote_pipeline

    what = PipelineRequest(document, changes, **vars(package), **vars(start))
    raise typer.Exit(run_remote_pipeline(what, place.endpoint(), wait=wait, as_json=json))


@app.command()
@expand_option_groups
def schedule(
    cron: Annotated[str, typer.Option(metavar="'M H D M W'", help="When, in UTC: five fields, or six with seconds.")],
    document: Run = None,
    changes: Set = [],
    *,
    place: BackendOptions,
    package: PackageOptions,
    start: StartOptions,
    replace: Annotated[bool, typer.Option("--replace", help="Take the place of a schedule of this name.")] = False,
    json: Json = False,
) -> None:
    """Upload, and start a run at every time of a cron expression; each is named <run.id>-<time>."""
    from podscale.commands.pipeline import PipelineRequest, schedule_pipeline

    what = PipelineRequest(document, changes, **vars(package), **vars(start))
    schedule_pipeline(what, place.endpoint(), cron=cron, replace=replace, as_json=json)
