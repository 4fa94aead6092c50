"""Position of each step in the endless stream of samples, for a run whose global batch changes.

Step s takes the samples from `images_before(s)` to `images_before(s + 1)`. A part of a run with another batch begins
with the first step whose samples all lie at or after its epoch. So the step that crosses that epoch still has the batch
of the part before, no sample is left out or repeated, and each epoch is one permutation of the split whatever the
batches are.

Times and lengths are counted in steps of the first batch: samples divided by the batch of step 0. While the batch is
constant, the time of a step is its number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from podscale.config.batch_phases import batch_phases

if TYPE_CHECKING:
    from podscale.config.train import TrainSection


@dataclass(frozen=True)
class BatchRange:
    """Consecutive steps of one batch, from step `first_step` on, which begins at sample `first_image` of the stream."""

    first_step: int
    first_image: int
    batch: int


@dataclass(frozen=True)
class StepPositions:
    """Positions of the steps of a run in a stream of `samples` samples an epoch. The first range begins at step 0."""

    samples: int
    ranges: tuple[BatchRange, ...]

    @classmethod
    def constant(cls, samples: int, batch: int) -> StepPositions:
        return cls(samples, (BatchRange(0, 0, batch),))

    @cached_property
    def epoch_length(self) -> float:
        """Length of an epoch, in steps of the first batch."""
        return self.samples / self.ranges[0].batch

    def batch_at(self, step: int) -> int:
        return self._range_at(step).batch

    def images_before(self, step: int) -> int:
        """Return the number of samples that the steps before `step`, from 0, take."""
        part = self._range_at(step)
        return part.first_image + (step - part.first_step) * part.batch

    def time_before(self, step: int) -> float:
        """Return the position of `step`, in steps of the first batch."""
        return self.images_before(step) / self.ranges[0].batch

    def time_of(self, steps: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Return the positions of `steps`, in steps of the first batch, float64 [n]; step -1 is at -1."""
        rows = [(part.first_step, part.first_image, part.batch) for part in self.ranges]
        starts, images, batches = np.array(rows, dtype=np.int64).T
        numbers = np.maximum(np.searchsorted(starts, steps, side="right") - 1, 0)
        position: Any = images[numbers] + (steps - starts[numbers]) * batches[numbers]
        time: npt.NDArray[np.float64] = position / self.ranges[0].batch
        return time

    def epoch_before(self, step: int) -> float:
        """Return the epochs that are done when `step` steps are."""
        return self.time_before(step) / self.epoch_length

    def first_step(self, epoch: float) -> int:
        """Return the first step whose samples all lie at or after `epoch`."""
        for part, following in zip(self.ranges, [*self.ranges[1:], None], strict=True):
            length = self.samples / part.batch
            begin = part.first_image / part.batch
            step = part.first_step + max(0, math.ceil(epoch * length - begin - 1e-9))  # rounding must not add a step
            if following is None or step <= following.first_step:
                return step
        raise AssertionError("the last range has no end")

    def _range_at(self, step: int) -> BatchRange:
        return next((part for part in reversed(self.ranges) if step >= part.first_step), self.ranges[0])


def step_positions(train: TrainSection, samples: int) -> StepPositions:
    """Return the positions of the steps of a run."""
    positions = StepPositions.constant(samples, train.global_batch)
    for phase in batch_phases(train)[1:]:
        if phase.global_batch == positions.ranges[-1].batch:
            continue
        first = positions.first_step(phase.start)
        begin = BatchRange(first, positions.images_before(first), phase.global_batch)
        kept = tuple(part for part in positions.ranges if part.first_step < first)
        positions = replace(positions, ranges=(*kept, begin))
    return positions
