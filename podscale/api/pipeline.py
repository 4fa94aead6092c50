"""The whole pipeline on this machine: shard, train, evaluate, report."""

import threading
import time
from collections.abc import Callable
from typing import Any, Literal

from podscale.api.documents import Document, load
from podscale.api.launch_view import LaunchDisplay, LaunchView, RecordForwarder
from podscale.api.results import Run
from podscale.config import RunConfig
from podscale.errors import InputError, error_from_exit_code
from podscale.pipelines.local_runner import LaunchResult, run_locally
from podscale.pipelines.stage_runners import ContainerRunner, ProcessRunner
from podscale.runs import Lease, RunDirectory, check_not_taken, stage_outcomes
from podscale.runs.stage_outcomes import EXIT_INTERRUPTED
from podscale.runs.user_code import user_code

RunnerName = Literal["process", "docker"]
RUNNERS: dict[RunnerName, Literal["here", "containers"]] = {"process": "here", "docker": "containers"}
"""Target of the preflight by runner of stages: processes of this machine, or containers of `launch.image`."""

_pipeline_lock = threading.Lock()


def run(
    document: Document | None = None,
    *,
    fresh: bool = False,
    runner: RunnerName = "process",
    progress: bool | Callable[[dict[str, Any]], None] = False,
    **overrides: Any,
) -> Run:
    """Run the pipeline on this machine: shard, train, evaluate, report. The same call again resumes it.

    Args:
        document: path, name of a preset, values by section, or a loaded document; None: the preset `digits`.
        fresh: move an earlier run of this id aside and start over.
        runner: `process`, or `docker` for containers of `launch.image`.
        progress: print the progress, as `podscale run` does; or a function that gets each record of the metrics.
        overrides: options by section, or by dotted name.

    Raises:
        PodscaleError: The error of the stage that failed; Preempted after a stop that saved.
        KeyboardInterrupt: After Ctrl-C, once the stage has saved.
    """
    config = load(document, **overrides)
    started = time.monotonic()
    display, view = LaunchDisplay(), None
    if callable(progress):
        display = RecordForwarder(config, progress)
    elif progress:
        display = view = LaunchView(config, steps=True)
    result = run_pipeline(config, display, runner=runner, fresh=fresh)
    if view is not None:
        view.print_result(result, time.monotonic() - started)
    if result.exit_code == EXIT_INTERRUPTED:
        raise KeyboardInterrupt(result.error)
    if result.exit_code:
        stage = f"{result.failed_stage}: " if result.failed_stage else ""
        raise error_from_exit_code(result.exit_code, f"{stage}{result.error}")
    return Run(config)


def run_pipeline(
    config: RunConfig,
    display: LaunchDisplay | None = None,
    *,
    runner: str = "process",
    fresh: bool = False,
    verbose: bool = False,
) -> LaunchResult:
    """Run the pipeline of a document and return its result, also if a stage fails.

    Raises InputError if nothing could be started. One pipeline runs at a time in a process, because kfp's local
    runner has global settings.
    """
    from podscale.config.preflight import preflight
    from podscale.stages.known_data import start_problems

    if runner not in RUNNERS:
        raise InputError("unknown runner", field="--runner", got=runner, hint="Choose process or docker.")
    display = display or LaunchDisplay()
    directory = RunDirectory.for_config(config)
    check_not_taken(directory.lease)
    with user_code(config):
        target = RUNNERS[runner]
        preflight(config, target, others=start_problems(config, target, fresh=fresh))
    stages = ProcessRunner() if runner == "process" else ContainerRunner(config)
    if not fresh:
        stage_outcomes.check_run_document(config)
    if not _pipeline_lock.acquire(blocking=False):
        raise InputError("another pipeline runs in this process", field=config.run.id, hint="Wait for it to end.")
    try:
        with Lease.acquire(directory.create().lease) as lease:
            if fresh and (moved := stage_outcomes.move_run_aside(config)) is not None:
                display.moved_aside(moved)
            stage_outcomes.prepare_run_directory(config)
            display.begin()
            return run_locally(config, lease, on_change=display.update, runner=stages, verbose=verbose)
    finally:
        _pipeline_lock.release()
