"""`podscale study`: a grid of runs on this machine, or as a package for a KFP backend."""

import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from podscale.config import RunConfig
from podscale.config.document import parse_overrides
from podscale.errors import InputError, PodscaleError, Preempted
from podscale.pipelines import presets
from podscale.study import StudyDocument, read_study
from podscale.study.budget import StudyPlan, plan_study
from podscale.study.grid import Trial, TrialGrid
from podscale.study.publish import write_study_results
from podscale.study.records import RecordStore, TrialRecord
from podscale.study.results import study_results
from podscale.study.runner import StudyRunner
from podscale.util import host_info
from podscale.util.formatting import format_count, format_duration
from podscale.util.processes import SigtermReceived
from podscale.util.terminal import paint


@dataclass(frozen=True)
class StudyOptions:
    """How a study is run: jobs at a time (0: as many as fit), minutes of its time box."""

    jobs: int = 0
    time_box: float | None = None
    restart: bool = False
    keep_runs: bool = False
    out: Path | None = None


def load_study(document: str, changes: Sequence[str]) -> StudyDocument:
    """The study that a person named, with the changes of the command line put on top of every cell."""
    return read_study(presets.resolve_study(document), parse_overrides(changes), presets.resolve_preset)


def run_study(document: str, changes: Sequence[str], options: StudyOptions, *, dry_run: bool, backend: str) -> None:
    """Runs what is missing of a study and writes its results, or with `dry_run` says what that would be."""
    if backend != "here":
        problem = "cells run `here`, or in the pods of a package for `kfp`"
        raise InputError(problem, field="--backend", got=backend)
    if options.out is not None and not options.out.is_dir():
        raise InputError("the folder does not exist", field="--out", got=str(options.out))
    study = load_study(document, changes)
    grid = TrialGrid(study)
    config = grid.series[0].config
    records = RecordStore(config.run.workspace)
    if options.restart and not dry_run:
        _delete_records(grid, records)
    jobs = options.jobs or default_jobs(config)
    minutes = options.time_box or study.time_box_minutes
    box = minutes * 60 if minutes is not None else None
    print(
        describe_study(study, plan_study(grid, records.get, jobs=jobs, time_box_seconds=box)),
        file=sys.stderr if not dry_run else sys.stdout,
    )
    if dry_run:
        return
    runner = StudyRunner(
        grid, records, jobs, box, keep_runs=options.keep_runs, on_trial_end=_TrialPrinter(grid, records, jobs, box)
    )
    runner.prepare()
    _run_and_write(runner, options)


def default_jobs(config: RunConfig) -> int:
    """Cells that this machine carries at a time: one where it has a GPU, else by cores."""
    if host_info.visible_gpus():
        return 1
    each = (config.launch.processes or host_info.default_processes_per_node()) * (config.launch.threads or 1)
    return max(1, host_info.cpu_count() // each)


def _run_and_write(runner: StudyRunner, options: StudyOptions) -> None:
    """Runs, and writes what there is however it ends."""
    get, grid = runner.records.get, runner.grid
    try:
        runner.run()
    except SigtermReceived:
        _write_results(runner, options)
        left = len(grid.due_trials(get)) + len(grid.pending_trials(get))
        problem = f"stopped on request with {format_count(left, 'cell')} left"
        raise Preempted(problem, field=f"study {grid.study.name}", hint="The same command continues.") from None
    except KeyboardInterrupt:
        _write_results(runner, options)
        raise
    _write_results(runner, options)
    if runner.failures:
        listing = "\n".join(f"  {name}: {error}" for name, error in runner.failures.items())
        raise PodscaleError(
            f"{format_count(len(runner.failures), 'cell')} failed without diverging",
            field=f"study {grid.study.name}",
            hint=f"Logs are in {runner.study_directory / 'logs'}; the same command runs them again:\n{listing}",
        )


def _write_results(runner: StudyRunner, options: StudyOptions) -> None:
    if not study_results(runner.grid, runner.records.get).records:
        return
    made = write_study_results(runner.grid.study)
    for path in made if options.out is not None else ():
        shutil.copyfile(path, (options.out or Path()) / path.name)
    print(made[0].read_text(encoding="utf-8").partition("\n![")[0].rstrip())
    print(f"results: {made[1]} (and {', '.join(path.name for path in made if path != made[1])})", flush=True)


def _delete_records(grid: TrialGrid, records: RecordStore) -> None:
    """Drops the records of a study; those that only came by its sweeps are found before theirs are gone."""
    for cell in grid.known_trials(records.get):
        records.delete(cell)


def describe_study(study: StudyDocument, made: StudyPlan) -> str:
    """The plan as text: what is done, what will run, what will not."""
    lines = [
        f"study {study.name}: {format_count(made.done_trials, 'cell')} done, {len(made.planned_trials) + len(made.excluded_trials)} to run"
    ]
    if made.widening:
        lines[0] += f", and up to {made.widening} more where the best rate of a sweep is at its edge"
    width = max((len(name) for name in made.seconds_by_series), default=0)
    for name, (kept, left) in made.seconds_by_series.items():
        lines.append(f"  {name:<{width}}  {kept:>3} to run" + (f", {left} left out" if left else ""))
    if made.planned_trials:
        lines.append(f"estimate: {_cost_line(made)}, {format_count(made.jobs, 'job')} at a time")
    if made.time_box_seconds is not None:
        lines.append(
            f"time box: {format_duration(made.time_box_seconds)}"
            + ("" if made.excluded_trials else ", in which all of it fits")
        )
    return "\n".join([*lines, *_excluded_lines(made)])


def _excluded_lines(made: StudyPlan) -> list[str]:
    """What does not fit into the time box; nothing where all of it does."""
    if not made.excluded_trials:
        return []
    seeds = sorted({cell.seed for cell in made.excluded_trials if cell.priority})
    whole = [name for name, (kept, _) in made.seconds_by_series.items() if not kept]
    lines = [f"LEFT OUT for the time box: {format_count(len(made.excluded_trials), 'cell')}"]
    if seeds:
        lines.append(f"  of the further seeds {', '.join(map(str, seeds))}")
    if whole:
        lines.append(f"  with nothing to be run of: {'; '.join(whole)}")
    return lines


def _cost_line(made: StudyPlan) -> str:
    if made.seconds is None:
        return "not known, as no cell was measured yet (cell_seconds in the document is a guess of yours)"
    basis = f"from {format_count(made.measured, 'measured cell')}" if made.measured else "by the document's guess"
    if made.pace is not None:
        basis += f", at {made.pace:.2g} s of the clock for a CPU second, as the newest of them took"
    return f"{format_duration(made.seconds)} ({basis})"


class _TrialPrinter:
    """Says how each cell ended and about how long the rest will take."""

    def __init__(self, grid: TrialGrid, records: RecordStore, jobs: int, box: float | None) -> None:
        self._grid, self._records, self._jobs = grid, records, jobs
        self._end = None if box is None else time.monotonic() + box
        self._ended = set[str]()
        self._warned = box is None

    def __call__(self, cell: Trial, record: TrialRecord | None, error: str) -> None:
        self._ended.add(cell.key)
        box = None if self._end is None else max(0.0, self._end - time.monotonic())
        made = plan_study(self._grid, self._records.get, jobs=self._jobs, time_box_seconds=box, ended=self._ended)
        how = _outcome_text(record) if record is not None else paint(f"failed: {error}", "bold red", sys.stderr)
        rest = f"about {format_duration(made.seconds)} left" if made.seconds else ""
        print(
            f"[{made.done_trials}/{made.done_trials + len(made.planned_trials)}] {cell.name}: {how}  {rest}",
            file=sys.stderr,
            flush=True,
        )
        if made.excluded_trials and not self._warned:
            print("\n".join(_excluded_lines(made)), file=sys.stderr, flush=True)
        self._warned = self._warned or made.measured > 0


def _outcome_text(record: TrialRecord) -> str:
    seconds = f" in {record.seconds:.1f} s" if record.seconds else ""
    return (f"{record.top1:.2%}" if record.top1 is not None else record.ended) + seconds


def compile_study_package(document: str, changes: Sequence[str], output: Path, *, parallel: int, kfp: str) -> None:
    """Writes the KFP package of a study."""
    if output.suffix not in (".yaml", ".yml"):
        raise InputError("a pipeline package ends in .yaml", field=str(output))
    from podscale.pipelines.study_pipeline import study_package

    study = load_study(document, changes)
    output.write_text(study_package(study, parallel=parallel, kfp=kfp), encoding="utf-8")
    print(f"{output}: the pipeline of study {study.name}")
