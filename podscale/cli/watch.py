"""`podscale watch`: live view of a run on one screen."""

from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from podscale.cli.documents import load_run_document
from podscale.cli.jobs import find_jobs
from podscale.cli.options import ClientCertificate, ClientKey, ClusterOptions, Json, complete_run, expand_option_groups
from podscale.errors import InputError, format_error
from podscale.pipelines import presets

if TYPE_CHECKING:
    from podscale.monitoring.watch.sources import JobSource
    from podscale.runs import RunDirectory

app = typer.Typer()

RUNS_DIRECTORY = Path("runs")


@app.command()
@expand_option_groups
def watch(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help="A run directory, a document, a preset, or an id; default: the newest run in ./runs.",
            autocompletion=complete_run,
        ),
    ] = None,
    stage: Annotated[str, typer.Option(help="Stage of a job on a cluster.")] = "train",
    once: Annotated[bool, typer.Option("--once", help="Show the current state and exit.")] = False,
    as_json: Json = False,
    *,
    cluster: ClusterOptions,
    client_certificate: ClientCertificate = None,
    client_key: ClientKey = None,
) -> None:
    """Show a run live on one screen: rates, phases, goodput, time left, every rank."""
    from podscale.monitoring.watch.live import show_run
    from podscale.monitoring.watch.sources import DirectorySource
    from podscale.telemetry.endpoint import ClientCertFiles

    client = ClientCertFiles.from_options(client_certificate, client_key)
    directory = _find_directory(run, cluster)
    source = (
        DirectorySource(directory, client)
        if directory is not None
        else _find_job(str(run), cluster, stage, follow=not once)
    )
    with closing(source), suppress(KeyboardInterrupt):
        show_run(source, once=once, as_json=as_json)


def _find_directory(run: str | None, cluster: ClusterOptions) -> "RunDirectory | None":
    """Return the directory of a run on this machine; None if the run is a job on a cluster.

    `run` is a directory, document, preset or id in ./runs (with cluster options: of a job); None is the newest run.
    """
    from podscale.runs import RunDirectory

    if run is None:
        return _newest_run()
    if Path(run).is_dir():
        return _check_run_directory(Path(run))
    if cluster != ClusterOptions():
        return None
    if Path(run).is_file() or run in presets.preset_names():
        path = RunDirectory.for_config(load_run_document(run, [])).path
    else:
        path = RUNS_DIRECTORY / run
    return _check_run_directory(path) if path.is_dir() else None


def _find_job(run: str, cluster: ClusterOptions, stage: str, *, follow: bool) -> "JobSource":
    from podscale.monitoring.watch.sources import JobSource

    try:
        found = find_jobs(run, cluster)
        jobs = found.entries()
    except InputError as error:
        reason = format_error(error.problem, field=error.field, got=error.got)
        problem = f"no directory {RUNS_DIRECTORY / run} here, and no answer from a cluster: {reason}"
        raise InputError(problem, field=f"run {run}", hint=error.hint) from error
    jobs_of_stage = [entry for entry in jobs if entry.stage == stage]
    if not jobs_of_stage:
        others = ", ".join(entry.stage for entry in jobs) or "none"
        raise InputError(
            f"no directory {RUNS_DIRECTORY / run} here, and no job of stage {stage} in namespace {found.api.namespace}",
            field=f"run {run}",
            hint=f"Jobs there: {others}",
        )
    return JobSource(found.api, jobs_of_stage[-1], follow=follow)


def _check_run_directory(path: Path) -> "RunDirectory":
    from podscale.runs import RunDirectory

    run = RunDirectory(path)
    if not any(file.exists() for file in (run.metrics, run.config, run.lease)):
        raise InputError(
            f"not a run directory (it holds no {run.metrics.name})",
            field=str(path),
            hint="Give <workspace>/runs/<id>, as `podscale run` printed it, or the run's id or document.",
        )
    return run


def _newest_run() -> "RunDirectory":
    """Return the run of ./runs with the newest metrics."""
    from podscale.runs import RunDirectory

    runs = [RunDirectory(path) for path in RUNS_DIRECTORY.glob("*") if (path / "metrics.jsonl").exists()]
    if not runs:
        hint = "Name one: podscale watch DIRECTORY, or the id of a job on a cluster."
        raise InputError("no run here", field="./runs", hint=hint)
    return max(runs, key=lambda run: run.metrics.stat().st_mtime)
