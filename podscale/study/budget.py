"""What a study will cost, and what of it does not fit into its time box: said before it starts.

An estimate comes from cells that were measured, here or by an earlier study of the same workspace: the nearest in
updates, of the same chain if there is one. Where nothing was measured the document's guess counts, else nobody knows.

Seconds of the clock grow with whatever else the machine does, CPU seconds hardly do. So a cell's cost is known in CPU
seconds, and what one of them takes of the clock is what it took of late: the median over the cells of this launch, and
before one has ended over the newest records. It is never less than the cores allow. Where GPUs or TPUs do the work
the clock counts as it was.
"""

import math
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from podscale.config import RunConfig
from podscale.study.grid import PendingTrial, SweepSeries, Trial, TrialGrid
from podscale.study.records import GetRecord, TrialRecord
from podscale.util import host_info


@dataclass(frozen=True)
class StudyPlan:
    """What is to be run. kept, excluded_trials: of the due cells and of those whose rate is not known yet, in their
    order.

    seconds: of all that is kept, one after the other, on `jobs` of them at a time; None where nothing is known. pace:
    of the clock for a CPU second; None where that was not measured. ended: measured cells of this launch.
    """

    done_trials: int
    planned_trials: Sequence[Trial | PendingTrial]
    excluded_trials: Sequence[Trial | PendingTrial]
    seconds: float | None
    measured: int
    jobs: int
    widening: int
    """Cells that sweeps may add, at most, where their best rate is at their edge."""
    time_box_seconds: float | None = None
    seconds_by_series: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """(kept, left out) of each chain."""
    pace: float | None = None
    ended: int = 0


RECENT_TRIALS = 5
"""Records that tell how fast the machine is before a cell of this launch has ended."""


class TrialCosts:
    """Seconds of cells, from the records of those that were measured.

    jobs: cells at a time. ended: keys of the cells that ended in this launch. cores: default: this machine's; 0: GPUs
    or TPUs do the work.
    """

    def __init__(
        self,
        cells: Iterable[Trial],
        get: GetRecord,
        guess: float | None,
        *,
        jobs: int = 1,
        ended: Collection[str] = (),
        cores: int | None = None,
    ) -> None:
        if cores is None:
            cores = 0 if host_info.visible_gpus() or host_info.tpu_chips() else host_info.cpu_count()
        found = [(cell, record) for cell in cells if (record := get(cell.key)) is not None and record.seconds > 0]
        whole = [(cell, record) for cell, record in found if _is_complete(record)]
        here = [record for cell, record in whole if cell.key in ended]
        recent = here or sorted((record for _, record in whole), key=lambda record: record.date)[-RECENT_TRIALS:]
        self.pace, self.ended = None, len(here)
        if recent and cores:
            took = statistics.median(record.seconds / record.cpu_seconds for record in recent)
            self.pace = max(took, jobs / cores)
        self._known: list[tuple[str, float, float, float]] = [
            (
                cell.series,
                *_epochs_and_steps(cell.config),
                record.seconds if self.pace is None else record.cpu_seconds * self.pace,
            )
            for cell, record in whole
        ]
        self._guess = guess

    @property
    def measured(self) -> int:
        return len(self._known)

    def seconds(self, cell: Trial | PendingTrial) -> float | None:
        """Of one cell: those of the nearest that was measured, more where it sees more images; None: nobody knows."""
        epochs, updates = _epochs_and_steps(cell.config)
        if not self._known:
            return self._guess
        nearest = min(self._known, key=lambda known: (known[0] != cell.series, abs(math.log(known[2] / updates))))
        _, known_epochs, known_updates, seconds = nearest
        return seconds * max(1.0, epochs / known_epochs, math.sqrt(updates / known_updates))


def plan_study(
    grid: TrialGrid,
    get: GetRecord,
    *,
    jobs: int,
    time_box_seconds: float | None,
    series: Sequence[SweepSeries] | None = None,
    ended: Collection[str] = (),
    cores: int | None = None,
) -> StudyPlan:
    """What the next launch will do, or the rest of this one. time_box_seconds: its seconds; series: a part of the
    study; ended, cores: see Costs."""
    cells = grid.known_trials(get).values()
    costs = TrialCosts(cells, get, grid.study.cell_seconds, jobs=jobs, ended=ended, cores=cores)
    waiting: list[Trial | PendingTrial] = sorted(
        [*grid.due_trials(get, series), *grid.pending_trials(get, series)], key=lambda cell: (cell.priority, cell.cost)
    )
    each = [costs.seconds(cell) for cell in waiting]
    kept: list[Trial | PendingTrial] = []
    left: list[Trial | PendingTrial] = []
    used = 0.0
    for cell, seconds in zip(waiting, each, strict=True):
        fits = time_box_seconds is None or seconds is None or used + seconds / jobs <= time_box_seconds
        if fits:
            used += (seconds or 0.0) / jobs
        (kept if fits and not left else left).append(cell)
    counts = {True: Counter(cell.series for cell in kept), False: Counter(cell.series for cell in left)}
    return StudyPlan(
        done_trials=sum(get(cell.key) is not None for cell in cells),
        planned_trials=kept,
        excluded_trials=left,
        seconds=None if None in each else used,
        measured=costs.measured,
        jobs=jobs,
        widening=sum(_may_widen_sweep(chain, get) for chain in (grid.series if series is None else series)),
        time_box_seconds=time_box_seconds,
        seconds_by_series={
            name: (counts[True][name], counts[False][name]) for name in dict.fromkeys(c.series for c in waiting)
        },
        pace=costs.pace,
        ended=costs.ended,
    )


def _may_widen_sweep(series: SweepSeries, get: GetRecord) -> int:
    section = series.rate_section
    if section is None or section.sweep is None or series.chosen_rate(get) is not None:
        return 0
    tried = max(0, len(series.sweep_rates(get)) - len(section.sweep.factors))
    return (section.sweep.widen - tried) * section.sweep.seeds


def _epochs_and_steps(config: RunConfig) -> tuple[float, float]:
    """(epochs, updates in units of the data set's size)."""
    return config.train.epochs, config.train.epochs / config.train.global_batch


def _is_complete(record: TrialRecord) -> bool:
    return record.ended == "done" and record.cpu_seconds > 0
