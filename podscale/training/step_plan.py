"""Steps of a run: their number, their learning rates, and the steps that an evaluation or a checkpoint follows.

Steps count from 1 here: step n is the n-th one, and "after step n" is the state with n steps done.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from podscale.config import RunConfig
from podscale.training import schedules


@dataclass(frozen=True)
class StepPlan:
    """Steps of a run of `training_images` images an epoch. The same on every rank and in every launch."""

    config: RunConfig
    training_images: int

    @cached_property
    def steps_per_epoch(self) -> float:
        return schedules.steps_per_epoch(self.config.train, self.training_images)

    @cached_property
    def steps(self) -> int:
        return schedules.total_steps(self.config.train, self.training_images)

    @cached_property
    def learning_rates(self) -> npt.NDArray[np.float64]:
        """Learning rate of every step, for the log: float64 [steps]."""
        return schedules.hyperparameters_at(self.config.train, np.arange(self.steps), self.steps_per_epoch)[:, 0]

    @cached_property
    def snapshot_steps(self) -> frozenset[int]:
        """Steps whose checkpoints are never deleted (`checkpoint.snapshots`).

        A snapshot is taken before a phase that begins at its epoch takes effect.
        """
        epochs = self.config.checkpoint.snapshots
        return frozenset(schedules.first_step(epoch, self.steps_per_epoch) for epoch in epochs)

    @cached_property
    def steps_between_saves(self) -> float:
        """Steps between two checkpoints; 0 if the document asks for none before the end."""
        settings = self.config.checkpoint
        return min(filter(None, (settings.every_steps, settings.every_epochs * self.steps_per_epoch)), default=0.0)

    def evaluates_after(self, step: int) -> bool:
        settings, per_epoch = self.config.evaluate, self.steps_per_epoch
        period, offset = settings.every_epochs * per_epoch, settings.offset * per_epoch
        return step == self.steps or completes_period(step, period, offset)

    def saves_after(self, step: int) -> bool:
        settings = self.config.checkpoint
        by_steps = settings.every_steps > 0 and step % settings.every_steps == 0
        by_epochs = completes_period(step, settings.every_epochs * self.steps_per_epoch)
        return step == self.steps or step in self.snapshot_steps or by_steps or by_epochs

    def is_due_after(self, step: int) -> bool:
        return self.evaluates_after(step) or self.saves_after(step)


def completes_period(step: int, period: float, offset: float = 0.0) -> bool:
    """Return True if `step` reaches `offset` + k x `period` for a further k >= 0; False for a period of 0.

    Steps 0 and below count as reached, so an `offset` of 0 gives the multiples of the period.
    """
    return period > 0 and _periods(step, period, offset) > _periods(step - 1, period, offset)


def _periods(step: int, period: float, offset: float) -> int:
    return max(-1, math.floor((step - offset) / period + 1e-9))
