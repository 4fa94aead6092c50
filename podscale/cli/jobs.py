"""Commands about jobs on a Kubernetes cluster; `doctor` looks at this machine too."""

from pathlib import Path
from typing import Annotated

import typer

from podscale.cli.options import (
    ClusterDefaults,
    Context,
    Defaults,
    Json,
    Namespace,
    Run,
    Set,
    ShardSetLocation,
    complete_run,
)

app = typer.Typer()

Stage = Annotated[str | None, typer.Option(metavar="STAGE", help="shard, train, evaluate or report.")]
RunOrId = Annotated[
    str,
    typer.Argument(metavar="RUN", help="Id of the run, or its document or preset.", autocompletion=complete_run),
]


@app.command()
def render(
    document: Run = None,
    changes: Set = [],
    backend: Annotated[
        str | None,
        typer.Option(help="pytorchjob, jaxjob, trainjob, jobset or job; default: what the document or hardware says."),
    ] = None,
    stage: Annotated[str, typer.Option(help="shard, train, evaluate, report, or all of them.")] = "train",
    defaults: Defaults = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write a file instead.")] = None,
) -> None:
    """Print the Kubernetes objects that carry out a run: `podscale render RUN | kubectl apply -f -`."""
    from podscale.commands.render import render_run

    render_run(document, changes, backend=backend, stage=stage, defaults=defaults, output=output)


@app.command()
def submit(
    document: Run = None,
    changes: Set = [],
    stage: Annotated[str, typer.Option(help="shard, train, evaluate, report, or all of them in turn.")] = "all",
    shard_set: ShardSetLocation = None,
    defaults: ClusterDefaults = "cluster",
    namespace: Namespace = None,
    context: Context = None,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Follow the job to its end, or return when it is submitted.")
    ] = True,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Have the API server check it and create nothing.")
    ] = False,
    stop_on_signal: Annotated[
        bool, typer.Option("--stop-on-signal", help="Delete the job on SIGTERM and Ctrl-C; else it runs on.")
    ] = False,
) -> None:
    """Carry out a run on a Kubernetes cluster, each stage as a job. The same command again adopts what is there."""
    from podscale.commands.cluster import ClusterOptions, run_submit

    where = ClusterOptions(namespace, context)
    code = run_submit(
        document,
        changes,
        where,
        stage=stage,
        shard_set=shard_set,
        defaults=defaults,
        wait=wait,
        dry_run=dry_run,
        stop_on_signal=stop_on_signal,
    )
    raise typer.Exit(code)


@app.command()
def status(
    run: RunOrId, stage: Stage = None, namespace: Namespace = None, context: Context = None, json: Json = False
) -> None:
    """Tell how the jobs of a run stand on the cluster, and why where they wait."""
    from podscale.commands.cluster import ClusterOptions, run_status

    raise typer.Exit(run_status(run, ClusterOptions(namespace, context), stage=stage, as_json=json))


@app.command()
def logs(
    run: RunOrId,
    stage: Annotated[str, typer.Option(help="shard, train, evaluate or report.")] = "train",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job has ended.")] = False,
    pod: Annotated[str | None, typer.Option(metavar="NAME", help="Another pod than that of rank 0.")] = None,
    namespace: Namespace = None,
    context: Context = None,
) -> None:
    """Print the log of rank 0, also through restarts."""
    from podscale.commands.cluster import ClusterOptions, run_logs

    run_logs(run, ClusterOptions(namespace, context), stage=stage, follow=follow, pod=pod)


@app.command()
def stop(
    run: RunOrId,
    stage: Stage = None,
    remove: Annotated[bool, typer.Option("--delete", help="Jobs that have ended go too, with their logs.")] = False,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Return when the pods are gone, or at once.")] = True,
    namespace: Namespace = None,
    context: Context = None,
) -> None:
    """End the jobs of a run: their pods save first, and submitting again goes on from there."""
    from podscale.commands.cluster import ClusterOptions, run_stop

    run_stop(run, ClusterOptions(namespace, context), stage=stage, remove=remove, wait=wait)


@app.command("list")
def list_jobs(namespace: Namespace = None, context: Context = None, json: Json = False) -> None:
    """List the jobs of a namespace."""
    from podscale.commands.cluster import ClusterOptions, run_list

    run_list(ClusterOptions(namespace, context), as_json=json)


@app.command()
def doctor(
    document: Run = None,
    changes: Set = [],
    json: Json = False,
    workspace: Annotated[Path, typer.Option(help="Where runs would be kept.")] = Path(),
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Look at the Kubernetes cluster instead, for the run document.")
    ] = False,
    defaults: ClusterDefaults = "cluster",
    namespace: Namespace = None,
    context: Context = None,
) -> None:
    """Tell what this machine, or a cluster, offers and what is missing for what."""
    if cluster:
        from podscale.commands.cluster import ClusterOptions, run_cluster_doctor

        where = ClusterOptions(namespace, context)
        raise typer.Exit(run_cluster_doctor(document, changes, where, defaults, as_json=json))
    from podscale.cli.doctor import run_doctor

    raise typer.Exit(run_doctor(workspace, as_json=json))
