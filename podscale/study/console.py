"""Terminal front end of studies: plan, progress of the trials, and results."""

import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from podscale.config import RunConfig
from podscale.errors import PodscaleError, Preempted
from podscale.study.budget import StudyPlan, plan_study
from podscale.study.document import StudyDocument
from podscale.study.grid import TrialGrid
from podscale.study.progress_file import progress_path, read_progress, write_progress
from podscale.study.records import RecordStore, TrialRecord
from podscale.study.result_files import write_study_results
from podscale.study.results import study_results
from podscale.study.runner import StudyRunner
from podscale.study.sweep_series import Trial
from podscale.util import host_info
from podscale.util.formatting import format_count, format_duration
from podscale.util.processes import SigtermReceived
from podscale.util.terminal import paint


class StudyOptions(NamedTuple):
    """Options of `podscale study`.

    Args:
        jobs: Trials at a time; 0 to choose by GPUs and cores.
        time_box_minutes: Time limit; None for the study's own.
        out: Folder for a copy of the results, and for the progress of an unfinished study.
        results_only: Write the results of the records so far; run nothing.
    """

    dry_run: bool
    jobs: int
    time_box_minutes: float | None
    restart: bool
    keep_runs: bool
    out: Path | None
    results_only: bool = False


def run_study(study: StudyDocument, options: StudyOptions) -> None:
    """Print the plan of a study and, unless it is a dry run, run its trials and write the results."""
    grid = TrialGrid(study)
    config = grid.series[0].config
    records = RecordStore(config.run.workspace)
    if options.out is not None and not options.restart and not options.dry_run:
        added = read_progress(grid, records, options.out)
        if added:
            print(f"{format_count(added, 'trial')} from {progress_path(options.out, study.name)}", file=sys.stderr)
    if options.results_only:
        _write_results(grid, records, options.out)
        return
    if options.restart and not options.dry_run:
        for key in grid.known_trials(records.get):  # all keys first: those of sweeps follow from other records
            records.delete(key)
    jobs = options.jobs or default_jobs(config)
    minutes = options.time_box_minutes or study.time_box_minutes
    box = minutes * 60 if minutes is not None else None
    plan = plan_study(grid, records.get, jobs=jobs, time_box_seconds=box)
    print(describe_plan(study, plan), file=sys.stdout if options.dry_run else sys.stderr)
    if options.dry_run:
        return
    printer = _TrialPrinter(grid, records, jobs, box)
    runner = StudyRunner(grid, records, jobs, box, keep_runs=options.keep_runs, on_trial_end=printer)
    runner.prepare()
    _run_and_write(runner, options.out)


def default_jobs(config: RunConfig) -> int:
    """Return the trials to run at a time: one if there is a GPU, else by cores."""
    if host_info.visible_gpus():
        return 1
    cores = (config.launch.processes or host_info.default_processes_per_node()) * (config.launch.threads or 1)
    return max(1, host_info.cpu_count() // cores)


def _run_and_write(runner: StudyRunner, out: Path | None) -> None:
    """Run the trials, and write the results even if the run is stopped."""
    get, grid = runner.records.get, runner.grid
    try:
        runner.run()
    except (SigtermReceived, KeyboardInterrupt) as stop:
        _write_if_any(runner, out)
        if isinstance(stop, KeyboardInterrupt):
            raise
        left = len(grid.due_trials(get)) + len(grid.pending_trials(get))
        problem = f"stopped on request with {format_count(left, 'trial')} left"
        raise Preempted(problem, field=f"study {grid.study.name}", hint="The same command continues.") from None
    _write_if_any(runner, out)
    if runner.failures:
        failures = "\n".join(f"  {name}: {error}" for name, error in runner.failures.items())
        raise PodscaleError(
            f"{format_count(len(runner.failures), 'trial')} failed without diverging",
            field=f"study {grid.study.name}",
            hint=f"Logs are in {runner.study_directory / 'logs'}; the same command runs them again:\n{failures}",
        )


def _write_if_any(runner: StudyRunner, out: Path | None) -> None:
    """Write the results, unless no trial has a record."""
    if study_results(runner.grid, runner.records.get).records:
        _write_results(runner.grid, runner.records, out)


def _write_results(grid: TrialGrid, records: RecordStore, out: Path | None) -> None:
    files = write_study_results(grid.study)
    if out is not None:
        for path in files:
            with suppress(shutil.SameFileError):  # --out is the study's own folder
                shutil.copyfile(path, out / path.name)
        write_progress(grid, records, out)
    print(files[0].read_text(encoding="utf-8").partition("\n![")[0].rstrip())
    print(f"results: {files[1]} (and {', '.join(path.name for path in files if path != files[1])})", flush=True)


def describe_plan(study: StudyDocument, plan: StudyPlan) -> str:
    """Return the trials done, to run and left out as text."""
    left = len(plan.planned_trials) + len(plan.excluded_trials)
    lines = [f"study {study.name}: {format_count(plan.done_trials, 'trial')} done, {left} to run"]
    if plan.widening:
        lines[0] += f", and up to {plan.widening} more if the best rate of a sweep is at its edge"
    width = max((len(name) for name in plan.counts_by_series), default=0)
    for name, (planned, excluded) in plan.counts_by_series.items():
        lines.append(f"  {name:<{width}}  {planned:>3} to run" + (f", {excluded} left out" if excluded else ""))
    if plan.planned_trials:
        lines.append(f"estimate: {_cost_line(plan)}, {format_count(plan.jobs, 'job')} at a time")
    if plan.time_box_seconds is not None:
        fits = "" if plan.excluded_trials else ", enough for all of them"
        lines.append(f"time box: {format_duration(plan.time_box_seconds)}{fits}")
    return "\n".join([*lines, *_excluded_lines(plan)])


def _excluded_lines(plan: StudyPlan) -> list[str]:
    if not plan.excluded_trials:
        return []
    seeds = sorted({trial.seed for trial in plan.excluded_trials if trial.priority > 0})
    skipped_series = [name for name, (planned, _) in plan.counts_by_series.items() if not planned]
    lines = [f"LEFT OUT for the time box: {format_count(len(plan.excluded_trials), 'trial')}"]
    if seeds:
        lines.append(f"  further seeds: {', '.join(map(str, seeds))}")
    if skipped_series:
        lines.append(f"  without any trial: {'; '.join(skipped_series)}")
    return lines


def _cost_line(plan: StudyPlan) -> str:
    if plan.seconds is None:
        return "not known until a trial is measured (cell_seconds in the document sets an estimate)"
    basis = f"from {format_count(plan.measured, 'measured trial')}" if plan.measured else "from cell_seconds"
    if plan.wall_cpu_ratio is not None:
        basis += f", at {plan.wall_cpu_ratio:.2g} wall seconds per CPU second, as in the newest of them"
    return f"{format_duration(plan.seconds)} ({basis})"


class _TrialPrinter:
    """Printer of each trial's result and of the estimated time left."""

    def __init__(self, grid: TrialGrid, records: RecordStore, jobs: int, box: float | None) -> None:
        self._grid, self._records, self._jobs = grid, records, jobs
        self._end = None if box is None else time.monotonic() + box
        self._ended = set[str]()
        self._warned = box is None

    def __call__(self, trial: Trial, record: TrialRecord | None, error: str) -> None:
        self._ended.add(trial.key)
        box = None if self._end is None else max(0.0, self._end - time.monotonic())
        plan = plan_study(self._grid, self._records.get, jobs=self._jobs, time_box_seconds=box, ended=self._ended)
        result = _format_record(record) if record is not None else paint(f"failed: {error}", "bold red", sys.stderr)
        left = f"about {format_duration(plan.seconds)} left" if plan.seconds else ""
        count = f"{plan.done_trials}/{plan.done_trials + len(plan.planned_trials)}"
        print(f"[{count}] {trial.name}: {result}  {left}", file=sys.stderr, flush=True)
        if plan.excluded_trials and not self._warned:
            print("\n".join(_excluded_lines(plan)), file=sys.stderr, flush=True)
        self._warned = self._warned or plan.measured > 0


def _format_record(record: TrialRecord) -> str:
    seconds = f" in {record.seconds:.1f} s" if record.seconds else ""
    return (f"{record.top1:.2%}" if record.top1 is not None else record.ended) + seconds
