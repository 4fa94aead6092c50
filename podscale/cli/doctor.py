"""`podscale doctor`: checks of this machine or of a cluster."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from podscale.cli.documents import load_run_document, load_with_defaults
from podscale.cli.jobs import ClusterOptions
from podscale.cli.options import ClusterDefaults, Json, Run, Set, expand_option_groups
from podscale.errors import PodscaleError
from podscale.util.terminal import CheckResult, print_check_results

app = typer.Typer()


@app.command()
@expand_option_groups
def doctor(
    document: Run = None,
    changes: Set = [],
    *,
    as_json: Json = False,
    workspace: Annotated[Path, typer.Option(help="Workspace to check.")] = Path(),
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Check the Kubernetes cluster instead, for the run document.")
    ] = False,
    defaults: ClusterDefaults = "cluster",
    pull: Annotated[
        bool,
        typer.Option(
            "--pull/--no-pull",
            help="With --cluster: let a node pull the images, by a Job of one small pod that is deleted; nothing else "
            "is created.",
        ),
    ] = True,
    cluster_options: ClusterOptions,
) -> None:
    """Check this machine, or a cluster, and print what it has and what is missing."""
    from podscale.cli.machine_doctor import check_machine

    results = (
        _check_cluster(document, [*changes, *cluster_options.changes], defaults, pull=pull)
        if cluster
        else check_machine(workspace)
    )
    raise typer.Exit(print_check_results(results, as_json=as_json))


def _check_cluster(document: str | None, changes: Sequence[str], defaults: str, *, pull: bool) -> list[CheckResult]:
    """Check a cluster for a document, without the cluster's defaults if they cannot be read."""
    from podscale.kubernetes.cluster_doctor import check_cluster

    defaults_error: PodscaleError | None = None
    try:
        config = load_with_defaults(document, changes, defaults)
    except PodscaleError as error:
        config = load_run_document(document, changes)  # raises if the document itself is wrong
        defaults_error = error
    results = list(check_cluster(config, pull=pull))
    if defaults_error is not None and results[0].verdict == "ok":  # else there is no API server to read them from
        advice = "fix them: the other checks ran without them"
        results.append(CheckResult("defaults", "missing", str(defaults_error), advice))
    return results
