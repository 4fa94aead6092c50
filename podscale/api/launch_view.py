"""Displays of a launch of the local pipeline: on a terminal with the table at the end, or by a function."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from podscale.config import RunConfig
from podscale.config.preflight.storage import shard_set_counts
from podscale.errors import ExitCode
from podscale.pipelines.local_runner import LaunchResult, LocalLaunch
from podscale.runs import RunDirectory, StageOutcome, ensemble_members, stage_outcomes
from podscale.telemetry.endpoint import Endpoint
from podscale.telemetry.events import EventRecord, FileTail, parse_record
from podscale.telemetry.step_log import StepLog
from podscale.util import progress_reports
from podscale.util.formatting import format_count, format_duration
from podscale.util.terminal import ProgressLine, paint
from podscale.version import VERSION

OVERHEAD_GOAL = 0.10
"""Goal for the pipeline's own fraction of the wall time."""


class LaunchDisplay:
    """Receiver of the progress of a launch; this one ignores it."""

    def moved_aside(self, directory: Path) -> None:
        """Receive the directory of an earlier run of this id."""

    def begin(self) -> None:
        """Receive the start of the launch; the caller holds the lease of the run directory."""

    def update(self, launch: LocalLaunch) -> None:
        """Receive the state of the launch, about ten times a second."""


class RecordForwarder(LaunchDisplay):
    """Receiver that calls a function with each new record of metrics.jsonl."""

    def __init__(self, config: RunConfig, callback: Callable[[EventRecord], None]) -> None:
        self._path, self._callback = RunDirectory.for_config(config).metrics, callback
        self._lines: FileTail | None = None

    def begin(self) -> None:
        self._lines = FileTail(self._path)

    def update(self, launch: LocalLaunch) -> None:
        for line in self._lines.read_lines() if self._lines is not None else ():
            if (record := parse_record(line)) is not None:
                self._callback(record)


class LaunchView(LaunchDisplay):
    """Display of a launch, read from its files: stages, progress and, with `steps`, the step log."""

    def __init__(self, config: RunConfig, *, steps: bool) -> None:
        self._config, self._run, self._with_steps = config, RunDirectory.for_config(config), steps
        self._bar = ProgressLine(sys.stderr)
        self._metrics: FileTail | None = None
        self._steps = StepLog(
            sys.stdout, config.telemetry.log
        )  # opened now, because sys.stdout is kfp's log while kfp runs
        self._begun_stages: set[str] = set()
        self._ended_stages: set[str] = set()
        self._stage: str | None = None
        self._since = time.monotonic()
        self._printed_endpoint = ""

    def moved_aside(self, directory: Path) -> None:
        self._print_line(f"the earlier run is now {directory}")

    def begin(self) -> None:
        """Print the title."""
        self._metrics = FileTail(self._run.metrics) if self._with_steps else None
        self._run.endpoint.unlink(missing_ok=True)  # left by a launch that was killed
        title = paint(f"podscale {VERSION}", "bold", sys.stderr)
        self._print_line(f"{title}: run {self._config.run.id} in {self._run.path}")

    def update(self, launch: LocalLaunch) -> None:
        """Print the changes since the last call."""
        for stage, outcome in launch.outcomes.items():
            if stage not in self._ended_stages and outcome.is_done:
                self._begin_stage(stage)  # it may have begun and ended since the last call
                self._print_metrics()
                self._ended_stages.add(stage)
                self._print_line(f"      {paint(self._stage_result(stage, outcome), 'green', sys.stderr)}")
        if launch.stage is not None:
            self._begin_stage(launch.stage)
        self._print_endpoint()
        self._print_metrics()
        if self._stage is not None and self._stage not in self._ended_stages:
            self._draw_progress(launch)

    def print_result(self, result: LaunchResult, seconds: float) -> None:
        """Print the table and the report, or the error; with JSON lines, also a summary line.

        `seconds` is the wall time of the launch.
        """
        self._bar.clear()
        run, json_lines = self._run, self._steps.json
        top1 = _read_top1(run) if result.exit_code == ExitCode.DONE else None
        if json_lines:
            print(json.dumps(_json_summary(self._config, result, seconds, top1)), flush=True)
        out = sys.stderr if json_lines else sys.stdout
        if result.outcomes:
            print(stage_table(result.timed_outcomes, seconds), file=out, flush=True)
        if result.exit_code == ExitCode.DONE:
            score = "" if top1 is None else f"top-1 {top1:.2%}"
            score = score if json_lines else paint(score, "bold green", sys.stdout)
            print(", ".join(filter(None, (score, f"report: {run.report}"))), file=out, flush=True)
        else:
            stage = f" in stage {result.failed_stage}" if result.failed_stage else ""
            self._print_line(f"output of the stages: {result.log}")
            self._print_line(f"{paint(f'podscale{stage}:', 'bold red', sys.stderr)} {result.error}")

    def _begin_stage(self, stage: str) -> None:
        """Print the heading of a stage, once."""
        if stage in self._begun_stages:
            return
        self._begun_stages.add(stage)
        self._stage, self._since = stage, time.monotonic()
        stages: tuple[str, ...] = stage_outcomes.planned_stages(self._config)
        if stage in stages:
            number = stages.index(stage) + 1
            self._print_line(paint(f"[{number}/{len(stages)}] {stage}", "bold", sys.stderr))
        else:
            members = ", ".join(member.config.run.id for member in ensemble_members.ensemble_members(self._config))
            self._print_line(f"      {stage}: {members}")

    def _print_endpoint(self) -> None:
        """Print the metrics URL; each stage that trains or evaluates has its own."""
        endpoint = Endpoint.read(self._run.endpoint)
        if endpoint is not None and endpoint.url != self._printed_endpoint:
            self._printed_endpoint = endpoint.url
            self._print_line(f"      metrics at {endpoint.url}")

    def _stage_result(self, stage: str, outcome: StageOutcome) -> str:
        result = "finished before, nothing to do" if outcome.reused else f"{outcome.seconds:.1f} s"
        splits = shard_set_counts(self._config) if stage == "shard" else {}
        counts = "".join(f", {format_count(number, f'{name} image')}" for name, number in splits.items())
        return f"{stage}: {result}{counts}"

    def _draw_progress(self, launch: LocalLaunch) -> None:
        """Draw the progress of the stage, or its duration if it reports none."""
        progress = progress_reports.read_progress(launch.progress_file)
        if progress is not None and not progress.done:
            self._bar(progress)
        else:
            self._bar.draw(f"      {self._stage}  {format_duration(time.monotonic() - self._since)}")

    def _print_metrics(self) -> None:
        """Print the new records of metrics.jsonl."""
        for line in self._metrics.read_lines() if self._metrics is not None else ():
            record = parse_record(line)
            if record is not None:
                self._bar.clear()
                self._steps.write(record)

    def _print_line(self, text: str) -> None:
        self._bar.clear()
        sys.stderr.write(f"{text}\n")  # not print(): kfp replaces that while a task runs
        sys.stderr.flush()


def stage_table(outcomes: dict[str, StageOutcome], seconds: float) -> str:
    """Return a table of the seconds, and the fraction of the total, of each stage and of the pipeline around them."""
    stages, overhead = stage_seconds(outcomes), pipeline_seconds(outcomes, seconds)
    width = max([10, *map(len, outcomes)])
    lines = [f"{'stage':<{width}}{'seconds':>9}{'share':>8}"]
    for stage, outcome in outcomes.items():
        note = "  finished before" if outcome.reused else "" if outcome.is_done else f"  exit code {outcome.exit_code}"
        lines.append(f"{stage:<{width}}{stages[stage]:>9.1f}{stages[stage] / seconds:>8.0%}{note}")
    goal = f"  (goal: below {OVERHEAD_GOAL:.0%})" if any(stages.values()) else ""
    lines.append(f"{'pipeline':<{width}}{overhead:>9.1f}{overhead / seconds:>8.0%}{goal}")
    lines.append(f"{'total':<{width}}{seconds:>9.1f}")
    return "\n".join(lines)


def stage_seconds(outcomes: dict[str, StageOutcome]) -> dict[str, float]:
    """Return the seconds of each stage in this launch; 0 if it was finished before."""
    return {stage: 0.0 if outcome.reused else outcome.seconds for stage, outcome in outcomes.items()}


def pipeline_seconds(outcomes: dict[str, StageOutcome], seconds: float) -> float:
    """Return the part of a launch's wall time, `seconds`, that is outside of its stages."""
    return max(0.0, seconds - sum(stage_seconds(outcomes).values()))


def _json_summary(config: RunConfig, result: LaunchResult, seconds: float, top1: float | None) -> dict[str, object]:
    return {
        "time": round(time.time(), 3),
        "kind": "event",
        "event": "ended",
        "run": config.run.id,
        "exit_code": int(result.exit_code),
        "error": result.error,
        "stages": {stage: round(spent, 3) for stage, spent in stage_seconds(result.timed_outcomes).items()},
        "pipeline": round(pipeline_seconds(result.timed_outcomes, seconds), 3),
        "seconds": round(seconds, 3),
        "top1": top1,
        "report": str(RunDirectory.for_config(config).report),
    }


def _read_top1(run: RunDirectory) -> float | None:
    from podscale.evaluation import evaluation_json

    return evaluation_json.read_evaluation(run.evaluation).scores.top1
