"""`podscale run`: the whole pipeline on this machine.

The table at the end of a run.
"""

import json
import sys
import time
from collections.abc import Sequence

from podscale.cli.documents import load_run_document
from podscale.config import RunConfig
from podscale.config.preflight import preflight
from podscale.config.preflight.storage import shard_set_counts
from podscale.errors import ExitCode, InputError
from podscale.pipelines.local_runner import LaunchResult, LocalLaunch, run_locally
from podscale.pipelines.stage_runners import ProcessRunner, StageRunner
from podscale.runs import Lease, RunDirectory, StageOutcome, check_not_taken, ensemble_members, stage_outcomes
from podscale.telemetry.endpoint import Endpoint
from podscale.telemetry.events import FileTail, parse_record
from podscale.telemetry.step_log import StepLog
from podscale.util import progress_reports
from podscale.util.formatting import format_count, format_duration
from podscale.util.terminal import ProgressLine, paint
from podscale.version import VERSION

OVERHEAD_GOAL = 0.10
"""The pipeline's own share of the time should stay below this."""


def stage_table(outcomes: dict[str, StageOutcome], seconds: float) -> str:
    """Seconds and share of each stage of a launch, and of the pipeline around them.

    seconds: wall time of the whole launch.
    """
    spent, overhead = stage_seconds(outcomes), pipeline_seconds(outcomes, seconds)
    width = max([10, *map(len, outcomes)])
    lines = [f"{'stage':<{width}}{'seconds':>9}{'share':>8}"]
    for stage, outcome in outcomes.items():
        note = "  finished before" if outcome.reused else "" if outcome.is_done else f"  exit code {outcome.exit_code}"
        lines.append(f"{stage:<{width}}{spent[stage]:>9.1f}{spent[stage] / seconds:>8.0%}{note}")
    goal = f"  (goal: below {OVERHEAD_GOAL:.0%})" if any(spent.values()) else ""
    lines.append(f"{'pipeline':<{width}}{overhead:>9.1f}{overhead / seconds:>8.0%}{goal}")
    lines.append(f"{'total':<{width}}{seconds:>9.1f}")
    return "\n".join(lines)


def stage_seconds(outcomes: dict[str, StageOutcome]) -> dict[str, float]:
    """Seconds that each stage took in this launch: none where it was finished before."""
    return {stage: 0.0 if outcome.reused else outcome.seconds for stage, outcome in outcomes.items()}


def pipeline_seconds(outcomes: dict[str, StageOutcome], seconds: float) -> float:
    """What is left of the launch's wall time besides its stages."""
    return max(0.0, seconds - sum(stage_seconds(outcomes).values()))


RUNNERS = ("process", "docker")


def run_local_pipeline(
    document: str | None, changes: Sequence[str], *, runner: str, dry_run: bool, fresh: bool, verbose: bool
) -> int:
    """Carries out, or with `dry_run` only describes, the pipeline; returns the exit code."""
    if runner not in RUNNERS:
        problem = "stages run as `process` or in containers, `docker`"
        raise InputError(problem, field="--runner", got=runner)
    started = time.monotonic() - time.process_time()  # imports so far count as the pipeline's own time
    config = load_run_document(document, changes)
    if dry_run:
        from podscale.cli.dry_run import describe_run

        print(describe_run(config, fresh=fresh))
        return int(ExitCode.DONE)
    run = RunDirectory.for_config(config)
    check_not_taken(run.lease)
    preflight(config, "here" if runner == "process" else "containers")
    stages = _build_runner(config, runner)
    if not fresh:
        stage_outcomes.check_run_document(config)
    with Lease.acquire(run.create().lease) as lease:
        moved = stage_outcomes.move_run_aside(config) if fresh else None
        if moved is not None:
            _print_line(f"the former run is now {moved}")
        return _run_and_display(
            config, stage_outcomes.prepare_run_directory(config), lease, started, stages, verbose=verbose
        )


def _build_runner(config: RunConfig, name: str) -> StageRunner:
    if name == "process":
        return ProcessRunner()
    from podscale.pipelines.stage_runners import ContainerRunner

    return ContainerRunner(config)


def _run_and_display(
    config: RunConfig, directory: RunDirectory, lease: Lease, started: float, runner: StageRunner, *, verbose: bool
) -> int:
    _print_line(f"{paint(f'podscale {VERSION}', 'bold', sys.stderr)}: run {config.run.id} in {directory.path}")
    view = LaunchView(config, steps=not verbose)
    ended = run_locally(config, lease, on_change=view.update, runner=runner, verbose=verbose)
    view.close()
    seconds = time.monotonic() - started
    if view.json:
        print(json.dumps(_json_summary(config, directory, ended, seconds)), flush=True)
    out = sys.stderr if view.json else sys.stdout
    if ended.outcomes:
        print(stage_table(ended.timed_outcomes, seconds), file=out, flush=True)
    if ended.exit_code == ExitCode.DONE:
        print(_result_line(directory, colour=not view.json), file=out, flush=True)
    else:
        where = f" in stage {ended.failed_stage}" if ended.failed_stage else ""
        _print_line(f"output of the stages: {ended.log}")
        _print_line(f"{paint(f'podscale{where}:', 'bold red', sys.stderr)} {ended.error}")
    return int(ended.exit_code)


class LaunchView:
    """Follows the files of a running launch: stages as they begin and end, how far they are, the step log.

    steps: show the step log; not where the stages' own output, which has it, is shown.
    """

    def __init__(self, config: RunConfig, *, steps: bool = True) -> None:
        self._config = config
        self._bar = ProgressLine(sys.stderr)
        self._metrics = FileTail(RunDirectory.for_config(config).metrics) if steps else None
        self._steps = StepLog(sys.stdout, config.telemetry.log)  # now: while kfp runs, sys.stdout is its log
        self._printed_stages: set[str] = set()
        self._stage: str | None = None
        self._since = time.monotonic()
        self._endpoint = RunDirectory.for_config(config).endpoint
        self._endpoint.unlink(missing_ok=True)  # of a launch that was killed
        self._printed_endpoint = ""

    @property
    def json(self) -> bool:
        """Standard output is for machines: JSON lines and nothing else."""
        return self._steps.json

    def update(self, launch: LocalLaunch) -> None:
        """Shows what has changed."""
        if launch.stage != self._stage:
            self._stage_started(launch.stage)
        self._print_endpoint()
        self._print_metrics()
        for stage, outcome in launch.outcomes.items():
            if stage not in self._printed_stages and outcome.is_done:
                self._printed_stages.add(stage)
                self._bar.clear()
                _print_line(f"      {paint(self._stage_ended(stage, outcome), 'green', sys.stderr)}")
        if self._stage is not None and self._stage not in self._printed_stages:
            self._draw_progress(launch)

    def close(self) -> None:
        """Leaves the terminal tidy."""
        self._bar.clear()

    def _stage_started(self, stage: str | None) -> None:
        self._stage, self._since = stage, time.monotonic()
        if stage in stage_outcomes.STAGES:
            self._bar.clear()
            number = stage_outcomes.STAGES.index(stage) + 1
            _print_line(paint(f"[{number}/{len(stage_outcomes.STAGES)}] {stage}", "bold", sys.stderr))
        elif stage is not None:
            self._bar.clear()
            members = ", ".join(member.config.run.id for member in ensemble_members.ensemble_members(self._config))
            _print_line(f"      {stage}: {members}")

    def _print_endpoint(self) -> None:
        """Where Prometheus can scrape the running stage; each stage that trains or evaluates has its own."""
        served = Endpoint.read(self._endpoint)
        if served is not None and served.url != self._printed_endpoint:
            self._printed_endpoint = served.url
            self._bar.clear()
            _print_line(f"      metrics at {served.url}")

    def _stage_ended(self, stage: str, outcome: StageOutcome) -> str:
        how = "finished before, nothing to do" if outcome.reused else f"{outcome.seconds:.1f} s"
        found = shard_set_counts(self._config) if stage == "shard" else {}
        counts = "".join(f", {format_count(number, f'{name} image')}" for name, number in found.items())
        return f"{stage}: {how}{counts}"

    def _draw_progress(self, launch: LocalLaunch) -> None:
        """How far the work is; where that is not told, how long it has been going on."""
        update = progress_reports.read_progress(launch.progress_file)
        if update is not None and not update.done:
            self._bar(update)
        else:
            self._bar.draw(f"      {self._stage}  {format_duration(time.monotonic() - self._since)}")

    def _print_metrics(self) -> None:
        """Prints what was appended to metrics.jsonl."""
        for line in self._metrics.read_lines() if self._metrics is not None else ():
            record = parse_record(line)
            if record is not None:
                self._bar.clear()
                self._steps.write(record)


def _json_summary(config: RunConfig, directory: RunDirectory, ended: LaunchResult, seconds: float) -> dict[str, object]:
    """The last line for machines."""
    return {
        "time": round(time.time(), 3),
        "kind": "event",
        "event": "ended",
        "run": config.run.id,
        "exit_code": int(ended.exit_code),
        "error": ended.error,
        "stages": {stage: round(taken, 3) for stage, taken in stage_seconds(ended.timed_outcomes).items()},
        "pipeline": round(pipeline_seconds(ended.timed_outcomes, seconds), 3),
        "seconds": round(seconds, 3),
        "top1": _top1(directory) if ended.exit_code == ExitCode.DONE else None,
        "report": str(directory.report),
    }


def _result_line(directory: RunDirectory, *, colour: bool) -> str:
    top1 = _top1(directory)
    if top1 is None:
        return f"report: {directory.report}"
    figure = f"top-1 {top1:.2%}"
    return f"{paint(figure, 'bold green', sys.stdout) if colour else figure}, report: {directory.report}"


def _top1(directory: RunDirectory) -> float | None:
    from podscale.evaluation import evaluation_json

    return evaluation_json.read_evaluation(directory.evaluation).figures.top1


def _print_line(text: str) -> None:
    sys.stderr.write(f"{text}\n")  # not print(): kfp replaces that while a task runs
    sys.stderr.flush()
