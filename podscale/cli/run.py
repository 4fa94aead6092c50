"""`podscale run`: the whole pipeline on this machine."""

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from podscale.cli.documents import load_run_document
from podscale.cli.options import Run, Set
from podscale.errors import InputError

if TYPE_CHECKING:
    from podscale.config import RunConfig
    from podscale.pipelines.stage_runners import StageRunner
    from podscale.runs import Lease

app = typer.Typer()

RUNNERS = ("process", "docker")


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
    if runner not in RUNNERS:
        raise InputError("unknown runner", field="--runner", got=runner, hint="Choose process or docker.")
    started = time.monotonic() - time.process_time()  # imports so far count as the pipeline's own time
    config = load_run_document(document, changes)
    if dry_run:
        from podscale.cli.dry_run import describe_run

        print(describe_run(config, fresh=fresh))
        return
    raise typer.Exit(_run_with_lease(config, runner, started, fresh=fresh, verbose=verbose))


def _run_with_lease(config: "RunConfig", runner: str, started: float, *, fresh: bool, verbose: bool) -> int:
    from podscale.cli.dry_run import memory_problems
    from podscale.config.preflight import preflight
    from podscale.runs import Lease, RunDirectory, check_not_taken, stage_outcomes

    run = RunDirectory.for_config(config)
    check_not_taken(run.lease)
    preflight(config, "here" if runner == "process" else "containers", others=memory_problems(config, fresh=fresh))
    stages = _build_runner(config, runner)
    if not fresh:
        stage_outcomes.check_run_document(config)
    with Lease.acquire(run.create().lease) as lease:
        if fresh and (moved := stage_outcomes.move_run_aside(config)) is not None:
            print(f"the earlier run is now {moved}", file=sys.stderr, flush=True)
        stage_outcomes.prepare_run_directory(config)
        return _run_and_display(config, lease, started, stages, verbose=verbose)


def _build_runner(config: "RunConfig", name: str) -> "StageRunner":
    from podscale.pipelines.stage_runners import ContainerRunner, ProcessRunner

    return ProcessRunner() if name == "process" else ContainerRunner(config)


def _run_and_display(
    config: "RunConfig", lease: "Lease", started: float, runner: "StageRunner", *, verbose: bool
) -> int:
    from podscale.cli.launch_view import LaunchView
    from podscale.pipelines.local_runner import run_locally

    view = LaunchView(config, steps=not verbose)
    view.print_title()
    result = run_locally(config, lease, on_change=view.update, runner=runner, verbose=verbose)
    view.print_result(result, time.monotonic() - started)
    return int(result.exit_code)
