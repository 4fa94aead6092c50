"""Commands that submit the pipeline of a run document to Kubeflow Pipelines."""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from podscale.cli.documents import check_policy, load_with_defaults
from podscale.cli.options import Defaults, Json, Kfp, Run, Set, expand_option_groups
from podscale.errors import ExitCode, PodscaleError
from podscale.util import env
from podscale.util.formatting import format_duration
from podscale.util.terminal import paint

if TYPE_CHECKING:
    from podscale.config import RunConfig
    from podscale.pipelines.kfp_backend import KfpBackend, PipelineVersion, RunRequest, StartedRun
    from podscale.pipelines.kfp_endpoint import KfpEndpoint
    from podscale.pipelines.kfp_runs import PipelineProgress

app = typer.Typer(help="Submit the pipeline of a run document to Kubeflow Pipelines.", no_args_is_help=True)

STATE_STYLES = {"SUCCEEDED": "green", "FAILED": "bold red", "CANCELED": "yellow", "CACHED": "green", "SKIPPED": "dim"}
HIDDEN_TASK_STATES = ("PENDING", "RUNTIME_STATE_UNSPECIFIED")


@dataclass(frozen=True)
class BackendOptions:
    """Options for the backend and its credentials."""

    host: Annotated[
        str | None, typer.Option(metavar="URL", help="KFP's API or user interface; default: KF_PIPELINES_ENDPOINT.")
    ] = None
    namespace: Annotated[
        str,
        typer.Option(
            "--namespace", "-n", help="Your namespace, if several users share the KFP; also that of --defaults cluster."
        ),
    ] = ""
    ui: Annotated[str | None, typer.Option(metavar="URL", help="User interface for the links; default: the host.")] = (
        None
    )
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help=f"Bearer token; default: {env.KFP_TOKEN} or _COOKIES.")
    ] = None
    ca_file: Annotated[Path | None, typer.Option(metavar="FILE", help="Certificate authority of the host (PEM).")] = (
        None
    )

    def endpoint(self) -> "KfpEndpoint":
        """Return the endpoint of these options, or of the environment."""
        from podscale.pipelines.kfp_endpoint import resolve_endpoint

        return resolve_endpoint(**vars(self))


@dataclass(frozen=True)
class PackageOptions:
    """Options of the pipeline package."""

    pipeline: Annotated[str, typer.Option(help="Name of the pipeline that gets a new version.")] = "podscale-training"
    defaults: Defaults = None
    cache: Annotated[
        bool, typer.Option("--cache/--no-cache", help="Let KFP reuse an earlier result of the shard stage.")
    ] = True
    kfp: Kfp = "2.16"


@dataclass(frozen=True)
class StartOptions:
    """Options of a started run."""

    experiment: Annotated[str, typer.Option(help="Experiment that the run belongs to.")] = "podscale"
    name: Annotated[str | None, typer.Option(help="Name to show; default: run.id.")] = None
    service_account: Annotated[
        str | None, typer.Option(metavar="NAME", help="Service account of the tasks; default: KFP's own.")
    ] = None

    def request(self, version: "PipelineVersion", config: "RunConfig", run_id: str) -> "RunRequest":
        from podscale.pipelines.kfp_backend import RunRequest

        name, parameters = self.name or config.run.id, {"run_id": run_id}
        return RunRequest(version, name, self.experiment, parameters, self.service_account)


@app.command()
@expand_option_groups
def upload(
    document: Run = None, changes: Set = [], *, backend: BackendOptions, package: PackageOptions, as_json: Json = False
) -> None:
    """Upload the package of a run document as the newest version of a pipeline; an unchanged one is not sent again."""
    endpoint = backend.endpoint()
    config = _load_document(document, changes, package, backend)
    _, version = _upload_package(config, endpoint, package)
    _print(asdict(version), _upload_message(version), as_json)


@app.command()
@expand_option_groups
def run(
    document: Run = None,
    changes: Set = [],
    *,
    backend: BackendOptions,
    package: PackageOptions,
    start: StartOptions,
    wait: Annotated[bool, typer.Option("--wait", help="Show the stages until the run ends; fail if it fails.")] = False,
    as_json: Json = False,
) -> None:
    """Upload the package and start a run. Interrupting --wait does not stop the run."""
    endpoint = backend.endpoint()
    config = _load_document(document, changes, package, backend)
    client, version = _upload_package(config, endpoint, package)
    started = client.run(start.request(version, config, config.run.id))
    _print(asdict(started), f"run {started.name}: {started.link}", as_json)
    if wait:
        raise typer.Exit(_follow_run(client, started))


@app.command()
@expand_option_groups
def schedule(
    cron: Annotated[
        str, typer.Option(metavar="'M H D M W'", help="Start times in UTC: five fields, or six with seconds.")
    ],
    document: Run = None,
    changes: Set = [],
    *,
    backend: BackendOptions,
    package: PackageOptions,
    start: StartOptions,
    replace: Annotated[bool, typer.Option("--replace", help="Replace a schedule of this name.")] = False,
    as_json: Json = False,
) -> None:
    """Upload the package and start a run, named <run.id>-<time>, at each time of a cron expression."""
    from podscale.pipelines.schedules import kfp_cron, scheduled_run_id

    fields = kfp_cron(cron)
    endpoint = backend.endpoint()
    config = _load_document(document, changes, package, backend)
    run_id = scheduled_run_id(config)
    client, version = _upload_package(config, endpoint, package)
    request = start.request(version, config, run_id)
    started = client.schedule(request, fields, replace=replace)
    _print(asdict(started), f"schedule {started.name} ({fields}): {started.link}", as_json)


def _load_document(
    document: str | None, changes: Sequence[str], package: PackageOptions, backend: BackendOptions
) -> "RunConfig":
    """Load a run document; the defaults of --defaults cluster are those of the namespace of --namespace."""
    from podscale.config.preflight import preflight

    config = load_with_defaults(document, changes, package.defaults, namespace=backend.namespace or None)
    preflight(config, "cluster")
    check_policy(config, package.defaults)
    return config


def _upload_package(
    config: "RunConfig", endpoint: "KfpEndpoint", package: PackageOptions
) -> "tuple[KfpBackend, PipelineVersion]":
    from podscale.pipelines.kfp_backend import connect_backend
    from podscale.pipelines.package import package_pipeline

    client = connect_backend(endpoint)  # before compiling: a wrong address fails at once
    text = package_pipeline(config, cache=package.cache, kfp=package.kfp)
    version = client.upload(text, package.pipeline, config.run.id, f"Podscale run {config.run.id}")
    print(_upload_message(version), file=sys.stderr)
    return client, version


def _upload_message(version: "PipelineVersion") -> str:
    return f"version {version.name} {'uploaded' if version.new else 'is there already'}: {version.link}"


def _print(content: dict[str, object], text: str, as_json: bool) -> None:
    print(json.dumps(content, indent=2) if as_json else text, flush=True)


def _follow_run(client: "KfpBackend", started: "StartedRun") -> int:
    """Print the stages of a run; return the exit code, 0 only if it succeeded."""
    view = _StagePrinter()
    try:
        state = client.follow(started.id, view.update)
    except KeyboardInterrupt:
        print(f"\nno longer watching; the run continues: {started.link}", file=sys.stderr)
        raise
    if state == "SUCCEEDED":
        return int(ExitCode.DONE)
    for error in _stage_errors(client, started):
        print(f"podscale: {error}", file=sys.stderr)
    print(
        f"podscale: run {started.name} ended {state}; its summary task has the result of each stage: {started.link}",
        file=sys.stderr,
    )
    return int(ExitCode.FAILED)


def _stage_errors(client: "KfpBackend", started: "StartedRun") -> list[str]:
    """Return the errors of the stages of a failed run; empty if the backend does not return them."""
    try:
        errors: list[str] = client.stage_errors(started.id)
    except PodscaleError:
        return []
    return errors


class _StagePrinter:
    """Printer of each change of a stage's state, with the time since the start of the display."""

    def __init__(self) -> None:
        from podscale.runs.stage_outcomes import STAGES

        self._start = time.monotonic()
        self._states: dict[str, str] = {}
        self._displayed_tasks = ("configure", "pack", *STAGES, "export", "collapse", "summary")

    def update(self, progress: "PipelineProgress") -> None:
        states = {
            name: state
            for name, state in progress.tasks.items()
            if name in self._displayed_tasks and state not in HIDDEN_TASK_STATES
        }
        for name, state in [*states.items(), ("run", progress.state)]:
            if self._states.get(name) != state:
                self._states[name] = state
                seconds = format_duration(time.monotonic() - self._start)
                painted = paint(f"{state.lower():<10}", STATE_STYLES.get(state, ""), sys.stderr)
                print(f"{seconds:>8}  {name:<9} {painted}".rstrip(), file=sys.stderr)
