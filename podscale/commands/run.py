"""`podscale run`: the whole pipeline on this machine."""

import json
import sys
import time
from collections.abc import Sequence

from podscale import ensemble, progress, resume
from podscale.commands.display import pipeline_seconds, stage_seconds, stage_table
from podscale.commands.documents import load
from podscale.config import RunConfig
from podscale.config.preflight import preflight, shard_set_counts
from podscale.errors import ExitCode, InputError
from podscale.pipelines.here import Ended, Launch, run_here
from podscale.pipelines.runners import Processes, Runner
from podscale.rundir import Lease, Outcome, RunDirectory, refuse_taken
from podscale.telemetry.endpoint import Endpoint
from podscale.telemetry.events import parse_record
from podscale.telemetry.follower import Follower
from podscale.telemetry.steplog import StepLog
from podscale.terminal import ProgressLine, paint
from podscale.text import count, duration
from podscale.version import VERSION

RUNNERS = ("process", "docker")


def run(document: str | None, changes: Sequence[str], *, runner: str, dry_run: bool, fresh: bool, verbose: bool) -> int:
    """Carries out, or with `dry_run` only describes, the pipeline; returns the exit code."""
    if runner not in RUNNERS:
        problem = "stages run as `process` or in containers, `docker`"
        raise InputError(problem, field="--runner", got=runner)
    started = time.monotonic() - time.process_time()  # imports so far count as the pipeline's own time
    config = load(document, changes)
    if dry_run:
        from podscale.commands.outline import outline

        print(outline(config, fresh=fresh))
        return int(ExitCode.DONE)
    run = RunDirectory.of(config)
    refuse_taken(run.lease)
    preflight(config, "here" if runner == "process" else "containers")
    stages = _runner(config, runner)
    if not fresh:
        resume.refuse_other_document(config)
    with Lease.acquire(run.create().lease) as lease:
        moved = resume.set_aside(config) if fresh else None
        if moved is not None:
            _say(f"the former run is now {moved}")
        return _carry_out(config, resume.open_run(config), lease, started, stages, verbose=verbose)


def _runner(config: RunConfig, name: str) -> Runner:
    if name == "process":
        return Processes()
    from podscale.pipelines.containers import Containers

    return Containers(config)


def _carry_out(
    config: RunConfig, directory: RunDirectory, lease: Lease, started: float, runner: Runner, *, verbose: bool
) -> int:
    _say(f"{paint(f'podscale {VERSION}', 'bold', sys.stderr)}: run {config.run.id} in {directory.path}")
    view = View(config, steps=not verbose)
    ended = run_here(config, lease, watch=view.update, runner=runner, verbose=verbose)
    view.close()
    seconds = time.monotonic() - started
    if view.json:
        print(json.dumps(_summary(config, directory, ended, seconds)), flush=True)
    out = sys.stderr if view.json else sys.stdout
    if ended.outcomes:
        print(stage_table(ended.timed, seconds), file=out, flush=True)
    if ended.exit_code == ExitCode.DONE:
        print(_result(directory, colour=not view.json), file=out, flush=True)
    else:
        where = f" in stage {ended.failed_stage}" if ended.failed_stage else ""
        _say(f"output of the stages: {ended.log}")
        _say(f"{paint(f'podscale{where}:', 'bold red', sys.stderr)} {ended.error}")
    return int(ended.exit_code)


class View:
    """Follows the files of a running launch: stages as they begin and end, how far they are, the step log.

    steps: show the step log; not where the stages' own output, which has it, is shown.
    """

    def __init__(self, config: RunConfig, *, steps: bool = True) -> None:
        self._config = config
        self._bar = ProgressLine(sys.stderr)
        self._metrics = Follower(RunDirectory.of(config).metrics) if steps else None
        self._steps = StepLog(sys.stdout, config.telemetry.log)  # now: while kfp runs, sys.stdout is its log
        self._told: set[str] = set()
        self._stage: str | None = None
        self._since = time.monotonic()
        self._endpoint = RunDirectory.of(config).endpoint
        self._endpoint.unlink(missing_ok=True)  # of a launch that was killed
        self._told_endpoint = ""

    @property
    def json(self) -> bool:
        """Standard output is for machines: JSON lines and nothing else."""
        return self._steps.json

    def update(self, launch: Launch) -> None:
        """Shows what has changed."""
        if launch.stage != self._stage:
            self._begin(launch.stage)
        self._tell_endpoint()
        self._follow()
        for stage, outcome in launch.outcomes.items():
            if stage not in self._told and outcome.done:
                self._told.add(stage)
                self._bar.clear()
                _say(f"      {paint(self._ended(stage, outcome), 'green', sys.stderr)}")
        if self._stage is not None and self._stage not in self._told:
            self._draw(launch)

    def close(self) -> None:
        """Leaves the terminal tidy."""
        self._bar.clear()

    def _begin(self, stage: str | None) -> None:
        self._stage, self._since = stage, time.monotonic()
        if stage in resume.STAGES:
            self._bar.clear()
            number = resume.STAGES.index(stage) + 1
            _say(paint(f"[{number}/{len(resume.STAGES)}] {stage}", "bold", sys.stderr))
        elif stage is not None:
            self._bar.clear()
            members = ", ".join(member.config.run.id for member in ensemble.members(self._config))
            _say(f"      {stage}: {members}")

    def _tell_endpoint(self) -> None:
        """Where Prometheus can scrape the running stage; each stage that trains or evaluates has its own."""
        served = Endpoint.read(self._endpoint)
        if served is not None and served.url != self._told_endpoint:
            self._told_endpoint = served.url
            self._bar.clear()
            _say(f"      metrics at {served.url}")

    def _ended(self, stage: str, outcome: Outcome) -> str:
        how = "finished before, nothing to do" if outcome.reused else f"{outcome.seconds:.1f} s"
        found = shard_set_counts(self._config) if stage == "shard" else {}
        counts = "".join(f", {count(number, f'{name} image')}" for name, number in found.items())
        return f"{stage}: {how}{counts}"

    def _draw(self, launch: Launch) -> None:
        """How far the work is; where that is not told, how long it has been going on."""
        update = progress.read(launch.progress)
        if update is not None and not update.done:
            self._bar(update)
        else:
            self._bar.draw(f"      {self._stage}  {duration(time.monotonic() - self._since)}")

    def _follow(self) -> None:
        """Prints what was appended to metrics.jsonl."""
        for line in self._metrics.lines() if self._metrics is not None else ():
            record = parse_record(line)
            if record is not None:
                self._bar.clear()
                self._steps.write(record)


def _summary(config: RunConfig, directory: RunDirectory, ended: Ended, seconds: float) -> dict[str, object]:
    """The last line for machines."""
    return {
        "time": round(time.time(), 3),
        "kind": "event",
        "event": "ended",
        "run": config.run.id,
        "exit_code": int(ended.exit_code),
        "error": ended.error,
        "stages": {stage: round(taken, 3) for stage, taken in stage_seconds(ended.timed).items()},
        "pipeline": round(pipeline_seconds(ended.timed, seconds), 3),
        "seconds": round(seconds, 3),
        "top1": _top1(directory) if ended.exit_code == ExitCode.DONE else None,
        "report": str(directory.report),
    }


def _result(directory: RunDirectory, *, colour: bool) -> str:
    top1 = _top1(directory)
    if top1 is None:
        return f"report: {directory.report}"
    figure = f"top-1 {top1:.2%}"
    return f"{paint(figure, 'bold green', sys.stdout) if colour else figure}, report: {directory.report}"


def _top1(directory: RunDirectory) -> float | None:
    from podscale.evaluate import evaluation as evaluations

    return evaluations.read(directory.evaluation).figures.top1


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")  # not print(): kfp replaces that while a task runs
    sys.stderr.flush()
