"""Studies: grids of small runs that answer a question, on this machine or as a package for a KFP backend."""

import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from podscale.cli.options import Kfp, Set
from podscale.errors import InputError, PodscaleError, Preempted
from podscale.pipelines import presets
from podscale.util import host_info
from podscale.util.formatting import format_count, format_duration
from podscale.util.processes import SigtermReceived
from podscale.util.terminal import paint

if TYPE_CHECKING:
    from podscale.config import RunConfig
    from podscale.study import StudyDocument
    from podscale.study.budget import StudyPlan
    from podscale.study.grid import TrialGrid
    from podscale.study.records import RecordStore, TrialRecord
    from podscale.study.runner import StudyRunner
    from podscale.study.sweep_series import Trial

app = typer.Typer()


def complete_study(incomplete: str) -> list[str]:
    """Return what a shell offers for STUDY."""
    files = [str(path) for path in Path().glob(f"{incomplete}*") if path.suffix in (".yaml", ".yml") or path.is_dir()]
    return [name for name in presets.study_names() if name.startswith(incomplete)] + files


@app.command()
def study(
    document: Annotated[
        str,
        typer.Argument(
            metavar="STUDY", help="Study document: a path or the name of one here.", autocompletion=complete_study
        ),
    ],
    changes: Set = [],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print cells, estimate and what is left out; start nothing.")
    ] = False,
    jobs: Annotated[int, typer.Option(help="Cells at a time; 0 = as many as the cores carry.", min=0)] = 0,
    time_box: Annotated[
        float | None, typer.Option(metavar="MINUTES", help="Begin no cell that would end later than this.", min=0.01)
    ] = None,
    restart: Annotated[bool, typer.Option("--restart", help="Forget the results there are, and run all anew.")] = False,
    keep_runs: Annotated[bool, typer.Option("--keep-runs", help="Leave the run directories of the cells.")] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the results here too, as files to commit.")
    ] = None,
    backend: Annotated[
        str, typer.Option(metavar="here|kfp", help="kfp: compile a package whose small jobs run the cells.")
    ] = "here",
    output: Annotated[Path, typer.Option("--output", "-o", help="With --backend kfp: file to write.")] = Path(
        "study.yaml"
    ),
    parallel: Annotated[int, typer.Option(help="With --backend kfp: pods at a time.", min=1)] = 8,
    kfp: Kfp = "2.16",
) -> None:
    """A grid of runs: table, curves with their spread, critical batch size. The same command again continues."""
    if backend == "kfp":
        _compile_package(document, changes, output, parallel=parallel, kfp=kfp)
        return
    from podscale.study.budget import plan_study
    from podscale.study.grid import TrialGrid
    from podscale.study.records import RecordStore
    from podscale.study.runner import StudyRunner

    if backend != "here":
        problem = "cells run `here`, or in the pods of a package for `kfp`"
        raise InputError(problem, field="--backend", got=backend)
    if out is not None and not out.is_dir():
        raise InputError("the folder does not exist", field="--out", got=str(out))
    chosen = load_study(document, changes)
    grid = TrialGrid(chosen)
    config = grid.series[0].config
    records = RecordStore(config.run.workspace)
    if restart and not dry_run:
        _delete_records(grid, records)
    jobs = jobs or default_jobs(config)
    minutes = time_box or chosen.time_box_minutes
    box = minutes * 60 if minutes is not None else None
    print(
        describe_study(chosen, plan_study(grid, records.get, jobs=jobs, time_box_seconds=box)),
        file=sys.stderr if not dry_run else sys.stdout,
    )
    if dry_run:
        return
    runner = StudyRunner(
        grid, records, jobs, box, keep_runs=keep_runs, on_trial_end=_TrialPrinter(grid, records, jobs, box)
    )
    runner.prepare()
    _run_and_write(runner, out)


def load_study(document: str, changes: Sequence[str]) -> "StudyDocument":
    """Load a study, with the changes of the command line put on top of every cell."""
    from podscale.config.document import parse_overrides
    from podscale.study import read_study

    return read_study(presets.resolve_study(document), parse_overrides(changes), presets.resolve_preset)


def default_jobs(config: "RunConfig") -> int:
    """Return the cells that this machine carries at a time: one if it has a GPU, else by cores."""
    if host_info.visible_gpus():
        return 1
    each = (config.launch.processes or host_info.default_processes_per_node()) * (config.launch.threads or 1)
    return max(1, host_info.cpu_count() // each)


def _run_and_write(runner: "StudyRunner", out: Path | None) -> None:
    """Run the cells, and write the results there are however it ends."""
    get, grid = runner.records.get, runner.grid
    try:
        runner.run()
    except SigtermReceived:
        _write_results(runner, out)
        left = len(grid.due_trials(get)) + len(grid.pending_trials(get))
        problem = f"stopped on request with {format_count(left, 'cell')} left"
        raise Preempted(problem, field=f"study {grid.study.name}", hint="The same command continues.") from None
    except KeyboardInterrupt:
        _write_results(runner, out)
        raise
    _write_results(runner, out)
    if runner.failures:
        listing = "\n".join(f"  {name}: {error}" for name, error in runner.failures.items())
        raise PodscaleError(
            f"{format_count(len(runner.failures), 'cell')} failed without diverging",
            field=f"study {grid.study.name}",
            hint=f"Logs are in {runner.study_directory / 'logs'}; the same command runs them again:\n{listing}",
        )


def _write_results(runner: "StudyRunner", out: Path | None) -> None:
    from podscale.study.publish import write_study_results
    from podscale.study.results import study_results

    if not study_results(runner.grid, runner.records.get).records:
        return
    made = write_study_results(runner.grid.study)
    for path in made if out is not None else ():
        shutil.copyfile(path, (out or Path()) / path.name)
    print(made[0].read_text(encoding="utf-8").partition("\n![")[0].rstrip())
    print(f"results: {made[1]} (and {', '.join(path.name for path in made if path != made[1])})", flush=True)


def _delete_records(grid: "TrialGrid", records: "RecordStore") -> None:
    """Delete the records of a study; those that only came by its sweeps are found before theirs are gone."""
    for cell in grid.known_trials(records.get):
        records.delete(cell)


def describe_study(study: "StudyDocument", made: "StudyPlan") -> str:
    """Return the plan as text: cells done, to run and left out."""
    left = len(made.planned_trials) + len(made.excluded_trials)
    lines = [f"study {study.name}: {format_count(made.done_trials, 'cell')} done, {left} to run"]
    if made.widening:
        lines[0] += f", and up to {made.widening} more where the best rate of a sweep is at its edge"
    width = max((len(name) for name in made.counts_by_series), default=0)
    for name, (kept, dropped) in made.counts_by_series.items():
        lines.append(f"  {name:<{width}}  {kept:>3} to run" + (f", {dropped} left out" if dropped else ""))
    if made.planned_trials:
        lines.append(f"estimate: {_cost_line(made)}, {format_count(made.jobs, 'job')} at a time")
    if made.time_box_seconds is not None:
        lines.append(
            f"time box: {format_duration(made.time_box_seconds)}"
            + ("" if made.excluded_trials else ", in which all of it fits")
        )
    return "\n".join([*lines, *_excluded_lines(made)])


def _excluded_lines(made: "StudyPlan") -> list[str]:
    """Return the lines about cells that do not fit into the time box."""
    if not made.excluded_trials:
        return []
    seeds = sorted({cell.seed for cell in made.excluded_trials if cell.priority})
    whole = [name for name, (kept, _) in made.counts_by_series.items() if not kept]
    lines = [f"LEFT OUT for the time box: {format_count(len(made.excluded_trials), 'cell')}"]
    if seeds:
        lines.append(f"  of the further seeds {', '.join(map(str, seeds))}")
    if whole:
        lines.append(f"  with nothing to be run of: {'; '.join(whole)}")
    return lines


def _cost_line(made: "StudyPlan") -> str:
    if made.seconds is None:
        return "not known, as no cell was measured yet (cell_seconds in the document is a guess of yours)"
    basis = f"from {format_count(made.measured, 'measured cell')}" if made.measured else "by the document's guess"
    if made.wall_cpu_ratio is not None:
        basis += f", at {made.wall_cpu_ratio:.2g} s of the clock for a CPU second, as the newest of them took"
    return f"{format_duration(made.seconds)} ({basis})"


class _TrialPrinter:
    """Print how each cell ended and about how long the rest will take."""

    def __init__(self, grid: "TrialGrid", records: "RecordStore", jobs: int, box: float | None) -> None:
        self._grid, self._records, self._jobs = grid, records, jobs
        self._end = None if box is None else time.monotonic() + box
        self._ended = set[str]()
        self._warned = box is None

    def __call__(self, cell: "Trial", record: "TrialRecord | None", error: str) -> None:
        from podscale.study.budget import plan_study

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


def _outcome_text(record: "TrialRecord") -> str:
    seconds = f" in {record.seconds:.1f} s" if record.seconds else ""
    return (f"{record.top1:.2%}" if record.top1 is not None else record.ended) + seconds


def _compile_package(document: str, changes: Sequence[str], output: Path, *, parallel: int, kfp: str) -> None:
    """Write the KFP package of a study."""
    if output.suffix not in (".yaml", ".yml"):
        raise InputError("a pipeline package ends in .yaml", field=str(output))
    from podscale.pipelines.study_pipeline import study_package

    study = load_study(document, changes)
    output.write_text(study_package(study, parallel=parallel, kfp=kfp), encoding="utf-8")
    print(f"{output}: the pipeline of study {study.name}")
