"""`podscale doctor`: checks of this machine or of a cluster."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from podscale.cli.documents import load_for_cluster, load_with_defaults
from podscale.cli.options import ClusterDefaults, ClusterOptions, Json, Run, Set, expand_option_groups
from podscale.errors import PodscaleError
from podscale.util.terminal import CheckResult, print_check_results

app = typer.Typer()

NAMESPACE_FIELD = "launch.cluster.namespace"
"""Field of the error for a namespace that does not exist, which the check of the namespace reports too."""


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
    """Check a cluster for a document, with the chart's defaults if those of the namespace cannot be read."""
    from podscale.kubernetes.cluster_doctor import check_cluster

    defaults_error: PodscaleError | None = None
    try:
        config = load_with_defaults(document, changes, defaults)
    except PodscaleError as error:
        config, _ = load_for_cluster(document, changes, None)  # raises if the document itself is wrong
        defaults_error = error
    results = list(check_cluster(config, pull=pull))
    has_server = results[0].verdict == "ok"  # else there is nothing to read the defaults from
    if defaults_error is not None and has_server and defaults_error.field != NAMESPACE_FIELD:
        advice = "fix them: the other checks assumed those of the chart"
        results.insert(1, CheckResult("defaults", "missing", str(defaults_error), advice))
    return results
