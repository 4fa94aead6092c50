"""Learning rate, momentum and weight decay of every step: pure functions, shared by both engines and the planner.

Steps count from 0. An epoch is one pass over the training split; it need not be a whole number of steps, because the
sample order is one continuous stream. A schedule follows the position in that stream: it also advances in a masked
(non-finite) step, and a change of the global batch neither stretches nor shortens it.

A run is a sequence of phases. The first one is the document's own schedule and begins at 0. Each entry of
`train.phases` begins with the first step whose images all lie at or after its epoch. A phase inherits the values that
it does not set: schedule, batch, weight decay, momentum, crop and size of images. A phase with its own schedule counts
from its own beginning. A schedule lasts until the next phase that sets one, or until the end of the run.

Times and lengths are in steps of the first batch (`StepPositions`), which are steps while the batch is constant.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from podscale.config import RunConfig, TrainSection
from podscale.config.schedule import CropSection, ScheduleSection
from podscale.data.step_positions import StepPositions, step_positions

COLUMNS: Sequence[str] = ("learning_rate", "momentum", "weight_decay")
"""Columns of `hyperparameters_at` and `step_table`."""
PLOT_COLUMNS: Sequence[str] = (*COLUMNS, "global_batch")
"""Columns of `sample_for_plot`."""

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class SchedulePhase:
    """One phase of a run with all its values, inherited ones included.

    Args:
        start: epoch at which the phase begins.
        schedule_start: epoch at which its schedule begins, possibly in an earlier phase.
        schedule_end: epoch at which its schedule ends.
        crop: random crop of the training images; None for `input.crop`.
        image_size: side of the training images, pixels; None for `input.image_size`.
        resets_momentum: the first step has momentum 0, which empties the momentum buffer.
    """

    start: float
    schedule: ScheduleSection
    schedule_start: float
    schedule_end: float
    momentum: float
    weight_decay: float
    crop: CropSection | None
    image_size: int | None
    resets_momentum: bool = False


def total_steps(train: TrainSection, samples: int) -> int:
    """Return the number of steps of the run, rounded up so that every image of the last epoch is seen."""
    return max(1, step_positions(train, samples).first_step(train.epochs))


def schedule_phases(train: TrainSection) -> list[SchedulePhase]:
    """Return the phases of the run, in order."""
    bounds = [0.0, *(phase.start for phase in train.phases if phase.schedule is not None), train.epochs]
    optimizer = train.optimizer
    current = SchedulePhase(0.0, train.schedule, 0.0, bounds[1], optimizer.momentum, optimizer.weight_decay, None, None)
    phases = [current]
    for section in train.phases:
        has_schedule = section.schedule is not None
        current = SchedulePhase(
            start=section.start,
            schedule=section.schedule or current.schedule,
            schedule_start=section.start if has_schedule else current.schedule_start,
            schedule_end=bounds[bounds.index(section.start) + 1] if has_schedule else current.schedule_end,
            momentum=current.momentum if section.momentum is None else section.momentum,
            weight_decay=current.weight_decay if section.weight_decay is None else section.weight_decay,
            crop=section.crop or current.crop,
            image_size=section.image_size or current.image_size,
            resets_momentum=section.reset_momentum,
        )
        phases.append(current)
    return phases


def image_phases(config: RunConfig, samples: int) -> list[tuple[int, int, CropSection]]:
    """Return (first step, side of the training images in pixels, random crop) of each phase, in order."""
    positions, images = step_positions(config.train, samples), config.input
    return [
        (positions.first_step(phase.start), phase.image_size or images.image_size, phase.crop or images.crop)
        for phase in schedule_phases(config.train)
    ]


def batch_norm_momenta(config: RunConfig, positions: StepPositions) -> list[tuple[int, float]]:
    """Return (first step, weight of new statistics in batch norm's running ones) of each change, in order."""
    changes = [(0, config.model.batch_norm.momentum)]
    for phase in config.train.phases:
        momentum = phase.batch_norm_momentum
        if momentum is not None and momentum != changes[-1][1]:
            changes.append((positions.first_step(phase.start), momentum))
    return changes


def step_table(train: TrainSection, samples: int) -> npt.NDArray[np.float32]:
    """Return `COLUMNS` of every step, float32 [steps, columns], for engines that count steps on the device."""
    steps = np.arange(total_steps(train, samples))
    return hyperparameters_at(train, steps, step_positions(train, samples)).astype(np.float32)


def hyperparameters_at(train: TrainSection, steps: npt.NDArray[np.int64], positions: StepPositions) -> FloatArray:
    """Return `COLUMNS` at these steps (int64, from 0), float64 [steps, columns]."""
    table = np.empty((len(steps), len(COLUMNS)))
    times, times_before, epoch = positions.time_of(steps), positions.time_of(steps - 1), positions.epoch_length
    for phase in schedule_phases(train):
        first = positions.first_step(phase.start)
        inside = steps >= first  # later phases overwrite the rows from their own beginning on
        begin = positions.time_before(positions.first_step(phase.schedule_start))
        since_start, before = times[inside] - begin, times_before[inside] - begin
        duration = (phase.schedule_end - phase.schedule_start) * epoch
        table[inside, 0] = _learning_rates(phase.schedule, since_start, duration, epoch)
        table[inside, 1] = _momenta(phase.schedule, phase.momentum, since_start, before, duration, epoch)
        table[inside, 2] = phase.weight_decay
        if phase.resets_momentum:
            table[steps == first, 1] = 0.0
    return table


def sample_for_plot(train: TrainSection, samples: int, points: int = 240) -> tuple[FloatArray, FloatArray]:
    """Return (epochs, values [n, columns]), float64, at about `points` steps and on both sides of each jump.

    The columns are `PLOT_COLUMNS`.
    """
    positions = step_positions(train, samples)
    last = total_steps(train, samples) - 1
    epochs = [phase.start for phase in schedule_phases(train)]
    for phase in schedule_phases(train):
        milestones = phase.schedule.milestones if phase.schedule.name == "step" else ()
        epochs += [phase.schedule_start + epoch for epoch in (phase.schedule.warmup_epochs, *milestones)]
    jumps = np.array([positions.first_step(epoch) for epoch in epochs])
    even = np.linspace(0, last, min(points, last + 1)).round().astype(np.int64)
    steps = np.unique(np.clip(np.concatenate([even, jumps - 1, jumps, jumps + 1]), 0, last))
    batches = np.array([positions.batch_at(step) for step in steps.tolist()], dtype=np.float64)
    values = np.column_stack([hyperparameters_at(train, steps, positions), batches])
    return positions.time_of(steps) / positions.epoch_length, values


def _learning_rates(schedule: ScheduleSection, since_start: FloatArray, duration: float, epoch: float) -> FloatArray:
    """Return learning rates: warm-up, then decay.

    The warm-up is linear (Goyal 2017, section 2.2) or a power of its elapsed fraction (Adya 2018, authors' code).
    Step decay is that of Goyal 2017; polynomial decay of power 2 that of You 2017, algorithm 1; cosine decay that of
    Loshchilov 2017 (SGDR; recalled, not looked up).

    Cosine and polynomial decay depend on their progress from 0 to 1. It begins at the end of the warm-up. With
    `decay_from: start` it begins with the schedule, so part of the decay has passed when the warm-up ends. With
    `decay_epochs` above the schedule's length the schedule ends before the decay does. Both options are as in Codreanu
    2017, whose code calls this `poly_cyc`.

    Args:
        since_start: time since the beginning of the schedule.
        duration: length of the schedule.
        epoch: length of an epoch.
    """
    warmup = schedule.warmup_epochs * epoch
    begin = warmup if schedule.decay_from == "warmup" else 0.0
    length = duration - begin if schedule.decay_epochs is None else schedule.decay_epochs * epoch
    peak = schedule.learning_rate
    progress = np.clip((since_start - begin) / length, 0.0, 1.0)
    match schedule.name:
        case "constant":
            decayed = np.full(len(since_start), peak)
        case "step":
            milestones = np.array(schedule.milestones) * epoch
            decayed = peak * schedule.gamma ** np.searchsorted(milestones, since_start, side="right")
        case "cosine":
            decayed = _interpolate(schedule.end_learning_rate, peak, 0.5 * (1.0 + np.cos(np.pi * progress)))
        case "polynomial":
            decayed = _interpolate(schedule.end_learning_rate, peak, (1.0 - progress) ** schedule.power)
    elapsed = since_start / max(warmup, 1e-9)
    if schedule.warmup_power != 1:
        elapsed = np.clip(elapsed, 0.0, 1.0) ** schedule.warmup_power
    return np.where(since_start < warmup, _interpolate(schedule.warmup_start, peak, elapsed), decayed)


def _momenta(
    schedule: ScheduleSection,
    momentum: float,
    since_start: FloatArray,
    before: FloatArray,
    duration: float,
    epoch: float,
) -> FloatArray:
    """Return the momenta: linear from `momentum_start` over the warm-up, then to `momentum_end` at the schedule's end.

    The momentum correction of Goyal 2017, section 3, and Codreanu 2017 multiplies the momentum by
    rate(t) / rate(t - 1) during the warm-up. A momentum buffer that contains learning rates (the unscaled form) then
    behaves like one that does not. The first step of a schedule, and a step after a rate of 0, need no correction.

    Args:
        momentum: momentum at the end of the warm-up.
        since_start: time since the beginning of the schedule.
        before: the same for the step before each.
        duration: length of the schedule.
        epoch: length of an epoch.
    """
    warmup = schedule.warmup_epochs * epoch
    start = momentum if schedule.momentum_start is None else schedule.momentum_start
    end = momentum if schedule.momentum_end is None else schedule.momentum_end
    rising = _interpolate(start, momentum, since_start / max(warmup, 1e-9))
    later = _interpolate(momentum, end, np.clip((since_start - warmup) / max(duration - warmup, 1e-9), 0.0, 1.0))
    momenta = np.where(since_start < warmup, rising, later)
    if not schedule.momentum_correction:
        return momenta
    rates, rates_before = (_learning_rates(schedule, times, duration, epoch) for times in (since_start, before))
    corrected = (since_start > 0) & (since_start < warmup) & (rates_before > 0)
    return np.where(corrected, momenta * rates / np.where(corrected, rates_before, 1.0), momenta)


def _interpolate(low: float, high: float, fraction: FloatArray) -> FloatArray:
    return low + (high - low) * fraction
