"""Commands for looking at runs."""

from pathlib import Path
from typing import Annotated

import typer

from podscale.cli.options import ClientCertificate, ClientKey, Context, Json, Namespace, complete_run

app = typer.Typer()
rules = typer.Typer(help="Recording rules and alerts for Prometheus.", no_args_is_help=True)
app.add_typer(rules, name="rules")
dashboards = typer.Typer(help="Dashboards for Grafana.", no_args_is_help=True)
app.add_typer(dashboards, name="dashboards")


@app.command()
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
    once: Annotated[bool, typer.Option("--once", help="Show it as it stands now and return.")] = False,
    json: Json = False,
    namespace: Namespace = None,
    context: Context = None,
    client_certificate: ClientCertificate = None,
    client_key: ClientKey = None,
) -> None:
    """Show a run on one screen while it goes on: rates, phases, goodput, time left, every rank."""
    from podscale.cli.watch import watch_run
    from podscale.commands import cluster
    from podscale.telemetry.endpoint import ClientCertFiles

    client = ClientCertFiles.from_options(client_certificate, client_key)
    where = cluster.ClusterOptions(namespace, context)
    raise typer.Exit(watch_run(run, where, stage=stage, once=once, as_json=json, client=client))


@app.command()
def monitor(
    runs: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of the runs.")] = Path("runs"),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0 = any free one.")] = 9090,
    client_certificate: ClientCertificate = None,
    client_key: ClientKey = None,
) -> None:
    """Start the real Prometheus with Podscale's rules for the runs of this machine, and tell which alerts fire."""
    from podscale.commands.monitor import run_monitor
    from podscale.telemetry.endpoint import ClientCertFiles

    run_monitor(runs, port, ClientCertFiles.from_options(client_certificate, client_key))


@rules.command("export")
def rules_export(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Folder for podscale-rules.yaml; made if missing.")],
    form: Annotated[
        str, typer.Option("--format", help="prometheus: a rule file; prometheusrule: for its operator; gmp: Google's.")
    ] = "prometheus",
    runbooks: Annotated[str, typer.Option(metavar="URL", help="Where docs/runbooks/ is served.")] = "docs/runbooks/",
    thresholds: Annotated[
        list[str], typer.Option("--threshold", metavar="NAME=NUMBER", help="Another limit (docs/runbooks).")
    ] = [],
    without: Annotated[list[str], typer.Option(metavar="ALERT", help="Leave out an alert.")] = [],
    shorten: Annotated[
        float, typer.Option(metavar="TIMES", help="Divide every window and wait by it, for a drill (docs/drills.md).")
    ] = 1,
) -> None:
    """Write the rules for a Prometheus that the chart does not reach."""
    from podscale.commands.rules import export_rules

    export_rules(directory, form=form, runbooks=runbooks, thresholds=thresholds, without=without, shorten=shorten)


@dashboards.command()
def export(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write them into; made where it is absent.")],
    runbooks: Annotated[
        str, typer.Option(metavar="URL", help="Where the pages of docs/runbooks/ are served, for the links.")
    ] = "docs/runbooks/",
) -> None:
    """Write the dashboards as files that Grafana's provisioning or its import page takes."""
    from podscale.commands.dashboards import export_dashboards as command

    command(folder, runbooks)
