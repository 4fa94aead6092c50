"""Steps of a run: their number, their learning rates, and the steps that an evaluation or a checkpoint follows.

Steps count from 1 here: step n is the n-th one, and "after step n" is the state with n steps done.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from podscale.config import RunConfig
from podscale.config.batch_phases import BatchPhase, batch_phases
from podscale.data.step_positions import StepPositions, step_positions
from podscale.training import schedules


@dataclass(frozen=True)
class StepPlan:
    """Steps of a run of `training_images` images an epoch. The same on every rank and in every launch."""

    config: RunConfig
    training_images: int

    @cached_property
    def positions(self) -> StepPositions:
        return step_positions(self.config.train, self.training_images)

    @cached_property
    def steps(self) -> int:
        return schedules.total_steps(self.config.train, self.training_images)

    @cached_property
    def learning_rates(self) -> npt.NDArray[np.float64]:
        """Learning rate of every step, for the log: float64 [steps]."""
        return schedules.hyperparameters_at(self.config.train, np.arange(self.steps), self.positions)[:, 0]

    @cached_property
    def snapshot_steps(self) -> frozenset[int]:
        """Steps whose checkpoints are never deleted (`checkpoint.snapshots`).

        A snapshot is taken before a phase that begins at its epoch takes effect.
        """
        return frozenset(self.positions.first_step(epoch) for epoch in self.config.checkpoint.snapshots)

    def epoch_after(self, step: int) -> float:
        return self.positions.epoch_before(step)

    def images_left_after(self, step: int) -> int:
        """Return the images of the steps after `step`, over all ranks."""
        return self.positions.images_before(self.steps) - self.positions.images_before(step)

    def batch_phase_after(self, step: int) -> BatchPhase:
        """Return the part of the run that the step after `step` belongs to; the last one after the last step."""
        return next(phase for first, phase in reversed(self._batch_phases) if min(step, self.steps - 1) >= first)

    def end_of_batch(self, step: int) -> int:
        """Return the number of steps after which the batch of the step after `step` changes or the run ends."""
        return min((first for first, _ in self._batch_phases if first > step), default=self.steps)

    @cached_property
    def _batch_phases(self) -> list[tuple[int, BatchPhase]]:
        """Parts of the run, each with the number of steps before it; a part without steps loses to the next."""
        return [(self.positions.first_step(phase.start), phase) for phase in batch_phases(self.config.train)]

    def evaluates_after(self, step: int) -> bool:
        settings = self.config.evaluate
        return step == self.steps or self._completes_epochs(step, settings.every_epochs, settings.offset)

    def saves_after(self, step: int) -> bool:
        settings = self.config.checkpoint
        by_steps = settings.every_steps > 0 and step % settings.every_steps == 0
        by_epochs = self._completes_epochs(step, settings.every_epochs)
        return step == self.steps or step in self.snapshot_steps or by_steps or by_epochs

    def is_due_after(self, step: int) -> bool:
        return self.evaluates_after(step) or self.saves_after(step)

    def _completes_epochs(self, step: int, every: float, offset: float = 0.0) -> bool:
        positions, length = self.positions, self.positions.epoch_length
        before, after = positions.time_before(step - 1), positions.time_before(step)
        return completes_period(before, after, every * length, offset * length)


def completes_period(before: float, after: float, period: float, offset: float = 0.0) -> bool:
    """Return True if the time from `before` to `after` reaches `offset` + k x `period` for a further k >= 0.

    An `offset` of 0 gives the multiples of the period, without 0 itself. A period of 0 is never completed.
    """
    return period > 0 and _periods(after, period, offset) > _periods(before, period, offset)


def _periods(time: float, period: float, offset: float) -> int:
    return max(-1, math.floor((time - offset) / period + 1e-9))
