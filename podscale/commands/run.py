"""`podscale run`: the whole pipeline on this machine."""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from podscale import resume
from podscale.commands.display import ProgressLine, stage_table
from podscale.commands.documents import load
from podscale.config import RunConfig
from podscale.config.preflight import preflight
from podscale.errors import ExitCode
from podscale.launch.follow import Display
from podscale.pipelines.here import Launch, run_here
from podscale.rundir import Lease, RunDirectory, refuse_taken
from podscale.shards.progress import Update
from podscale.telemetry.steplog import StepLog
from podscale.version import VERSION


def run(document: str | None, changes: Sequence[str], *, dry_run: bool, fresh: bool, verbose: bool) -> int:
    """Carries out, or with `dry_run` only describes, the pipeline; returns the exit code."""
    started = time.monotonic() - time.process_time()  # imports so far count as the pipeline's own time
    config = load(document, changes)
    if dry_run:
        from podscale.commands.outline import outline

        print(outline(config, fresh=fresh))
        return int(ExitCode.DONE)
    run = RunDirectory.of(config)
    refuse_taken(run.lease)
    preflight(config, "here")
    if not fresh:
        resume.refuse_other_document(config)
    with Lease.acquire(run.create().lease) as lease:
        moved = resume.set_aside(config) if fresh else None
        if moved is not None:
            _say(f"the former run is now {moved}")
        return _carry_out(config, resume.open_run(config), lease, started, verbose=verbose)


def _carry_out(config: RunConfig, directory: RunDirectory, lease: Lease, started: float, *, verbose: bool) -> int:
    _say(f"podscale {VERSION}: run {config.run.id} in {directory.path}")
    view = View(config)
    ended = run_here(config, lease, watch=view.update, verbose=verbose)
    view.close()
    if ended.outcomes:
        print(stage_table(ended.outcomes, time.monotonic() - started), flush=True)
    if ended.exit_code == ExitCode.DONE:
        print(_result(directory))
    else:
        where = f" in stage {ended.failed_stage}" if ended.failed_stage else ""
        _say(f"output of the stages: {ended.log}")
        _say(f"podscale{where}: {ended.error}")
    return int(ended.exit_code)


class View:
    """Follows the files of a running launch: stages as they begin and end, packing progress, the step log."""

    def __init__(self, config: RunConfig) -> None:
        self._bar = ProgressLine()
        steps = StepLog(sys.stdout, config.telemetry.log)  # now: while kfp runs, sys.stdout is its log
        self._display = Display(RunDirectory.of(config).metrics, None, steps, sys.stderr)
        self._told: set[str] = set()
        self._stage: str | None = None

    def update(self, launch: Launch) -> None:
        """Shows what has changed."""
        if launch.stage != self._stage:
            self._stage = launch.stage
            if self._stage in resume.STAGES:
                number = resume.STAGES.index(self._stage) + 1
                _say(f"[{number}/{len(resume.STAGES)}] {self._stage}")
        if self._stage == "shard":
            self._draw(launch.progress)
        self._display.update()
        for stage, outcome in launch.outcomes.items():
            if stage not in self._told and outcome.done:
                self._told.add(stage)
                self._bar.clear()
                how = "finished before, nothing to do" if outcome.reused else f"{outcome.seconds:.1f} s"
                _say(f"      {stage}: {how}")

    def close(self) -> None:
        """Leaves the terminal tidy."""
        self._bar.clear()

    def _draw(self, progress: Path) -> None:
        try:
            update = Update(**json.loads(progress.read_text(encoding="ascii")))
        except (OSError, ValueError):
            return
        self._bar(update)


def _result(directory: RunDirectory) -> str:
    from podscale.evaluate import evaluation as evaluations

    top1 = evaluations.read(directory.evaluation).figures.top1
    return f"{f'top-1 {top1:.2%}, ' if top1 is not None else ''}report: {directory.report}"


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")  # not print(): kfp replaces that while a task runs
    sys.stderr.flush()
