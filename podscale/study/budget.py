"""Cost estimate of a study, and the trials that exceed its time box.

A trial is estimated from measured trials of the same workspace: from the one nearest in training steps, preferably of
the same series. Without measurements the document's `cell_seconds` is the estimate, or there is none.

Wall time depends on the load of the machine, CPU time hardly does. A trial's cost is therefore kept in CPU seconds and
multiplied by the recent pace (wall seconds per CPU second): the median over the trials of this launch, or over the
newest records until one has finished. The pace is never less than the number of cores allows. With GPUs or TPUs wall
time is used directly.
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
    """Trials of the next launch and their estimated time.

    Args:
        planned_trials: trials that fit the time box, in the order in which they run.
        excluded_trials: trials that do not fit.
        seconds: estimated wall time of the planned trials with `jobs` at a time; None if unknown.
        measured: number of measured trials behind the estimate.
        pace: wall seconds per CPU second; None if not measured.
        ended: measured trials of this launch.
    """

    done_trials: int
    planned_trials: Sequence[Trial | PendingTrial]
    excluded_trials: Sequence[Trial | PendingTrial]
    seconds: float | None
    measured: int
    jobs: int
    widening: int
    """Largest number of trials that sweeps may add if their best rate is at an edge."""
    time_box_seconds: float | None = None
    seconds_by_series: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """(planned, excluded) trials of each series."""
    pace: float | None = None
    ended: int = 0


RECENT_TRIALS = 5
"""Number of newest records that give the pace until a trial of this launch has finished."""


class TrialCosts:
    """Estimated wall time of trials, from the records of measured ones.

    Args:
        guess: estimate in seconds if nothing was measured.
        jobs: trials at a time.
        ended: keys of the trials that finished in this launch.
        cores: CPU cores; default: this machine's; 0 if GPUs or TPUs do the work.
    """

    def __init__(
        self,
        trials: Iterable[Trial],
        get: GetRecord,
        guess: float | None,
        *,
        jobs: int = 1,
        ended: Collection[str] = (),
        cores: int | None = None,
    ) -> None:
        if cores is None:
            cores = 0 if host_info.visible_gpus() or host_info.tpu_chips() else host_info.cpu_count()
        found = [(trial, record) for trial in trials if (record := get(trial.key)) is not None and record.seconds > 0]
        whole = [(trial, record) for trial, record in found if _is_complete(record)]
        current = [record for trial, record in whole if trial.key in ended]
        recent = current or sorted((record for _, record in whole), key=lambda record: record.date)[-RECENT_TRIALS:]
        self.pace, self.ended = None, len(current)
        if recent and cores:
            pace = statistics.median(record.seconds / record.cpu_seconds for record in recent)
            self.pace = max(pace, jobs / cores)
        self._known: list[tuple[str, float, float, float]] = [
            (
                trial.series,
                *_epochs_and_steps(trial.config),
                record.seconds if self.pace is None else record.cpu_seconds * self.pace,
            )
            for trial, record in whole
        ]
        self._guess = guess

    @property
    def measured(self) -> int:
        return len(self._known)

    def seconds(self, trial: Trial | PendingTrial) -> float | None:
        """Estimate one trial from the nearest measured one, scaled up if it trains longer; None if unknown."""
        epochs, updates = _epochs_and_steps(trial.config)
        if not self._known:
            return self._guess
        nearest = min(self._known, key=lambda known: (known[0] != trial.series, abs(math.log(known[2] / updates))))
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
    """Plan the next launch, or the rest of this one.

    Args:
        series: part of the study to plan; default: all of it.
        ended: see TrialCosts.
        cores: see TrialCosts.
    """
    trials = grid.known_trials(get).values()
    costs = TrialCosts(trials, get, grid.study.cell_seconds, jobs=jobs, ended=ended, cores=cores)
    waiting: list[Trial | PendingTrial] = sorted(
        [*grid.due_trials(get, series), *grid.pending_trials(get, series)],
        key=lambda trial: (trial.priority, trial.cost),
    )
    each = [costs.seconds(trial) for trial in waiting]
    kept: list[Trial | PendingTrial] = []
    excluded: list[Trial | PendingTrial] = []
    used = 0.0
    for trial, seconds in zip(waiting, each, strict=True):
        fits = time_box_seconds is None or seconds is None or used + seconds / jobs <= time_box_seconds
        if fits:
            used += (seconds or 0.0) / jobs
        (kept if fits and not excluded else excluded).append(trial)
    counts = {True: Counter(trial.series for trial in kept), False: Counter(trial.series for trial in excluded)}
    return StudyPlan(
        done_trials=sum(get(trial.key) is not None for trial in trials),
        planned_trials=kept,
        excluded_trials=excluded,
        seconds=None if None in each else used,
        measured=costs.measured,
        jobs=jobs,
        widening=sum(_may_widen_sweep(sweep, get) for sweep in (grid.series if series is None else series)),
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
    """Return (epochs, steps divided by the number of training images)."""
    return config.train.epochs, config.train.epochs / config.train.global_batch


def _is_complete(record: TrialRecord) -> bool:
    return record.ended == "done" and record.cpu_seconds > 0
