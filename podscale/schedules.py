"""The schedules of a run: pure functions of the update's number, shared by every engine and the planner.

A step is one update, from 0. An epoch is one pass over the training split; it need not be a whole number of steps,
because the sample order is one continuous stream. A schedule follows the position in that stream, so a masked
(non-finite) update uses up its step.
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from podscale.config import TrainSection

COLUMNS: Sequence[str] = ("learning_rate", "momentum", "weight_decay")
"""Columns of `table`."""


def steps_per_epoch(train: TrainSection, samples: int) -> float:
    """Updates per pass over `samples` training images."""
    return samples / train.global_batch


def total_steps(train: TrainSection, samples: int) -> int:
    """Updates of the whole run: every image of the last (part of an) epoch is seen, so the last batch rounds up."""
    exact = train.epochs * steps_per_epoch(train, samples)
    return max(1, math.ceil(exact - 1e-9))


def learning_rate(train: TrainSection, step: int, steps_per_epoch: float) -> float:
    """The learning rate of update `step`: linear warm-up (Goyal 2017, section 2.2), then the named decay.

    The decay runs from the end of the warm-up to the end of the run; milestones of the step schedule count from the
    start of the run.
    """
    schedule = train.schedule
    warmup = schedule.warmup_epochs * steps_per_epoch
    if step < warmup:
        return schedule.warmup_start + (schedule.learning_rate - schedule.warmup_start) * step / warmup
    progress = min(1.0, (step - warmup) / (train.epochs * steps_per_epoch - warmup))
    match schedule.name:
        case "constant":
            return schedule.learning_rate
        case "step":
            passed = sum(step >= milestone * steps_per_epoch for milestone in schedule.milestones)
            return float(schedule.learning_rate * schedule.gamma**passed)
        case "cosine":
            remaining = 0.5 * (1.0 + math.cos(math.pi * progress))
        case "polynomial":
            remaining = (1.0 - progress) ** schedule.power
    return schedule.end_learning_rate + (schedule.learning_rate - schedule.end_learning_rate) * remaining


def table(train: TrainSection, samples: int) -> npt.NDArray[np.float32]:
    """Every step's values as float32 [steps, columns], for engines that keep the step on the device."""
    per_epoch = steps_per_epoch(train, samples)
    rates = [learning_rate(train, step, per_epoch) for step in range(total_steps(train, samples))]
    rows = [(rate, train.optimizer.momentum, train.optimizer.weight_decay) for rate in rates]
    return np.asarray(rows, dtype=np.float32)


def crosses(step: int, period: float) -> bool:
    """Whether the `step`-th update (counted from 1) completes another `period` of updates; never for a period of 0."""
    return period > 0 and math.floor(step / period + 1e-9) > math.floor((step - 1) / period + 1e-9)
