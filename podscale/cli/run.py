"""`podscale run`: the whole pipeline on this machine."""

import time
from typing import Annotated

import typer

from podscale.cli.documents import load_run_document
from podscale.cli.options import Run, Set

app = typer.Typer()


@app.command()
def run(
    document: Run = None,
    changes: Set = [],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and start nothing.")] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Move an earlier run of this id aside and start over.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show the output of kfp and the stages.")] = False,
    runner: Annotated[
        str, typer.Option(metavar="process|docker", help="docker: each stage in a container of launch.image.")
    ] = "process",
) -> None:
    """Run the pipeline on this machine: shard, train, evaluate, report. The same command again resumes it."""
    started = time.monotonic() - time.process_time()  # imports so far count as the pipeline's own time
    config = load_run_document(document, changes)
    if dry_run:
        from podscale.cli.dry_run import describe_run
        from podscale.runs.user_code import user_code

        with user_code(config):
            print(describe_run(config, fresh=fresh))
        return
    from podscale.api.launch_view import LaunchView
    from podscale.api.pipeline import run_pipeline

    view = LaunchView(config, steps=not verbose)
    result = run_pipeline(config, view, runner=runner, fresh=fresh, verbose=verbose)
    view.print_result(result, time.monotonic() - started)
    raise typer.Exit(int(result.exit_code))
