"""Cost estimate of a study, and the trials that exceed its time box.

The estimate of a trial comes from the measured trial with the nearest number of training steps, of the same series if
it has one. Without measurements it is `cell_seconds` of the study document, if set.

Wall time depends on the load of the machine, CPU time hardly does. Costs are therefore CPU seconds times the recent
ratio of wall to CPU time: the median over the trials that finished in this launch, or over the newest records until one
has. The ratio is at least `jobs` / cores, because more jobs than cores share the cores. With GPUs or TPUs wall time is
used directly.
"""

import math
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from podscale.config import RunConfig
from podscale.config.batch_phases import batch_phases
from podscale.study.grid import TrialGrid, training_epochs
from podscale.study.records import GetRecord
from podscale.study.sweep_series import PlannedTrial, SweepSeries, Trial
from podscale.util import host_info

RECENT_TRIALS = 5
"""Newest records that give the wall-to-CPU ratio until a trial of this launch has finished."""


@dataclass(frozen=True)
class StudyPlan:
    """Trials of the next launch and their estimated time.

    Args:
        done_trials: Number of trials with a record.
        planned_trials: Trials that fit the time box, in the order in which they run.
        excluded_trials: The first trial that does not fit, and all after it.
        seconds: Estimated wall time with `jobs` trials at a time; None if unknown.
        measured: Number of measured trials behind the estimate.
        jobs: Trials at a time.
        widening: Maximal number of trials that sweeps may add if their best learning rate is at an edge.
        counts_by_series: (planned, excluded) numbers of trials of each series that has some left.
        wall_cpu_ratio: Wall seconds per CPU second; None if not measured.
        ended: Number of measured trials that finished in this launch.
    """

    done_trials: int
    planned_trials: Sequence[PlannedTrial]
    excluded_trials: Sequence[PlannedTrial]
    seconds: float | None
    measured: int
    jobs: int
    widening: int
    time_box_seconds: float | None
    counts_by_series: Mapping[str, tuple[int, int]]
    wall_cpu_ratio: float | None
    ended: int


class _MeasuredTrial(NamedTuple):
    """Measured trial; `steps` is the number of steps divided by the number of training images."""

    series: str
    epochs: float
    steps: float
    seconds: float


class TrialCosts:
    """Estimated wall time of trials, from the records of measured ones.

    Args:
        trials: Trials of the study that are known so far.
        get: Returns the record of a trial, None if it has not run.
        guess: Estimate in seconds if nothing was measured; None for no estimate.
        jobs: Trials at a time.
        ended: Keys of the trials that finished in this launch.
        cores: CPU cores, 0 if GPUs or TPUs do the work; default: those of this machine.
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
        records = [(trial, record) for trial in trials if (record := get(trial.key)) is not None and record.is_measured]
        current = [record for trial, record in records if trial.key in ended]
        recent = current or sorted((record for _, record in records), key=lambda record: record.date)[-RECENT_TRIALS:]
        self.wall_cpu_ratio, self.ended = None, len(current)
        if recent and cores:
            ratio = statistics.median(record.seconds / record.cpu_seconds for record in recent)
            self.wall_cpu_ratio = max(ratio, jobs / cores)
        self._measured = [
            _MeasuredTrial(
                trial.series,
                *_epochs_and_steps(trial.config),
                record.seconds if self.wall_cpu_ratio is None else record.cpu_seconds * self.wall_cpu_ratio,
            )
            for trial, record in records
        ]
        self._guess = guess

    @property
    def measured(self) -> int:
        return len(self._measured)

    def seconds(self, trial: PlannedTrial) -> float | None:
        """Estimate one trial, seconds of wall time, from the nearest measured one; None if unknown.

        The estimate is scaled up if the trial trains for more epochs or in more steps, never down. More steps count by
        their square root only.
        """
        epochs, steps = _epochs_and_steps(trial.config)
        if not self._measured:
            return self._guess
        nearest = min(
            self._measured, key=lambda other: (other.series != trial.series, abs(math.log(other.steps / steps)))
        )
        return nearest.seconds * max(1.0, epochs / nearest.epochs, math.sqrt(steps / nearest.steps))


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
        grid: Grid of the study.
        get: Returns the record of a trial.
        jobs: Trials at a time.
        time_box_seconds: Wall time for all planned trials; None for no limit.
        series: Part of the study to plan; default: all.
        ended: Keys of the trials that finished in this launch.
        cores: CPU cores, 0 if GPUs or TPUs do the work; default: those of this machine.
    """
    trials = grid.known_trials(get).values()
    costs = TrialCosts(trials, get, grid.study.cell_seconds, jobs=jobs, ended=ended, cores=cores)
    waiting = sorted([*grid.due_trials(get, series), *grid.pending_trials(get, series)], key=lambda trial: trial.order)
    planned, excluded = list[PlannedTrial](), list[PlannedTrial]()
    total, is_known = 0.0, True
    for trial in waiting:
        seconds = costs.seconds(trial)
        fits = time_box_seconds is None or seconds is None or total + seconds / jobs <= time_box_seconds
        if excluded or not fits:
            excluded.append(trial)
            continue
        is_known = is_known and seconds is not None
        total += (seconds or 0.0) / jobs
        planned.append(trial)
    counts = [Counter(trial.series for trial in part) for part in (planned, excluded)]
    return StudyPlan(
        done_trials=sum(get(trial.key) is not None for trial in trials),
        planned_trials=planned,
        excluded_trials=excluded,
        seconds=total if is_known else None,
        measured=costs.measured,
        jobs=jobs,
        widening=sum(_max_added_trials(sweep, get) for sweep in (grid.series if series is None else series)),
        time_box_seconds=time_box_seconds,
        counts_by_series={trial.series: (counts[0][trial.series], counts[1][trial.series]) for trial in waiting},
        wall_cpu_ratio=costs.wall_cpu_ratio,
        ended=costs.ended,
    )


def _max_added_trials(series: SweepSeries, get: GetRecord) -> int:
    """Return the maximal number of trials that may be added to the sweep of a series; 0 if its rate is chosen."""
    section = series.rate_section
    if section is None or section.sweep is None or series.chosen_rate(get) is not None:
        return 0
    widened = max(0, len(series.sweep_rates(get)) - len(section.sweep.factors))
    return (section.sweep.widen - widened) * section.sweep.seeds


def _epochs_and_steps(config: RunConfig) -> tuple[float, float]:
    """Return (epochs, steps divided by the number of training images)."""
    phases = batch_phases(config.train)
    ends = [*(phase.start for phase in phases[1:]), config.train.epochs]
    steps = sum((end - phase.start) / phase.global_batch for phase, end in zip(phases, ends, strict=True))
    epochs = training_epochs(config)
    return epochs, steps + (epochs - config.train.epochs) / config.train.global_batch
