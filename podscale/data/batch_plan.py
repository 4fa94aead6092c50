"""Batch plan: the samples of one step, with their crops and augmentations, that a loader decodes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from podscale.config.data import Interpolation
from podscale.config.run_config import RunConfig
from podscale.config.schedule import CropSection
from podscale.data.augment import Augmentation
from podscale.data.crop import CropParamsBatch, evaluation_crops, random_filters, training_crops
from podscale.data.loaders.base import BadRecordGuard, Batch
from podscale.data.sampler import RowIndices, Sampler, evaluation_rows
from podscale.data.shard_set import Split

ImagePhases = Sequence[tuple[int, int, CropSection]]
"""(first step, side of the images in pixels, random crop) of each phase of a training, in order."""


@dataclass(frozen=True)
class BatchRequest:
    """Samples of one process in one step.

    Args:
        planned_rows: int64 [n], rows that the sampler chose.
        rows: int64 [n], the same with substitutes for bad records.
        epochs: int64 [n], as in `SampleIndices`.
        weights: float32 [n], 1 for a sample, 0 for padding, which comes last.
    """

    step: int
    planned_rows: RowIndices
    rows: RowIndices
    epochs: RowIndices
    weights: npt.NDArray[np.float32]

    @property
    def sample_count(self) -> int:
        """Number of samples without the padding, which is not decoded."""
        return int(np.count_nonzero(self.weights))


class BatchPlan(Protocol):
    """Plan of a training or an evaluation, for a loader."""

    split: Split
    interpolation: Interpolation
    """Filter of all crops; of a random one, that of evaluation."""

    @property
    def augment(self) -> Augmentation | None:
        """Augmentation after the crop; None: no augmentation."""
        ...

    def image_size_at(self, step: int) -> int:
        """Return the side of the images of a step, in pixels."""
        ...

    def end_of_shape(self, start: int, stop: int) -> int:
        """Return the first step after `start` with another image size or number of images, at most `stop`."""
        ...

    def request_at(self, step: int) -> BatchRequest: ...

    def crops_of(self, step: int, rows: RowIndices, epochs: RowIndices) -> CropParamsBatch:
        """Return the crops of these `rows` in their `epochs`, both int64 [n]."""
        ...

    def filters_of(self, rows: RowIndices, epochs: RowIndices) -> npt.NDArray[np.bool_]:
        """Return True for each crop, of `rows` in their `epochs`, that is resized bicubically; False for bilinearly."""
        ...

    def make_batch(self, request: BatchRequest, images: Any) -> Batch:
        """Return the batch of decoded `images`, uint8 [n, size, size, 3], and count its bad records."""
        ...


class TrainingBatchPlan:
    """The part of each global batch that `ranks` train on, in random crops, with substitutes for bad records."""

    def __init__(
        self,
        config: RunConfig,
        split: Split,
        sampler: Sampler,
        guard: BadRecordGuard,
        *,
        phases: ImagePhases,
        ranks: range,
        world_size: int,
    ) -> None:
        self.split, self.interpolation, self._phases = split, config.input.eval_interpolation, phases
        self._draws_filters = config.input.interpolation == "random"
        self._seed = config.run.seed
        self._sampler, self._guard, self._ranks, self._world_size = sampler, guard, ranks, world_size
        augments = config.input.augment.is_enabled
        self.augment = Augmentation(config.input.augment, self._seed, config.input.mean) if augments else None

    def request_at(self, step: int) -> BatchRequest:
        parts = [self._sampler.rank_batch(step, rank, self._world_size) for rank in self._ranks]
        asked, epochs = np.concatenate([p.rows for p in parts]), np.concatenate([p.epochs for p in parts])
        rows = self._guard.substitute_all(asked, epochs)
        return BatchRequest(step, asked, rows, epochs, np.ones(len(asked), dtype=np.float32))

    def crops_of(self, step: int, rows: RowIndices, epochs: RowIndices) -> CropParamsBatch:
        keys, sizes = self.split.keys[rows], _image_sizes(self.split, rows)
        return training_crops(self._seed, epochs, keys, *sizes, crop=self.crop_at(step), size=self.image_size_at(step))

    def filters_of(self, rows: RowIndices, epochs: RowIndices) -> npt.NDArray[np.bool_]:
        if self._draws_filters:
            return random_filters(self._seed, epochs, self.split.keys[rows])
        return np.full(len(rows), self.interpolation == "bicubic")

    def image_size_at(self, step: int) -> int:
        return self._phase_at(step)[1]

    def end_of_shape(self, start: int, stop: int) -> int:
        size, positions = self.image_size_at(start), self._sampler.positions
        changes = [first for first, other, _ in self._phases if other != size]
        changes += [part.first_step for part in positions.ranges]
        return min((first for first in changes if start < first < stop), default=stop)

    def crop_at(self, step: int) -> CropSection:
        return self._phase_at(step)[2]

    def _phase_at(self, step: int) -> tuple[int, int, CropSection]:
        return next(phase for phase in reversed(self._phases) if step >= phase[0])

    def make_batch(self, request: BatchRequest, images: Any) -> Batch:
        self._guard.count_delivered(request.sample_count, int(np.count_nonzero(request.rows != request.planned_rows)))
        return _build_batch(self.split, request, images, request.weights)


class EvaluationBatchPlan:
    """Every sample of a split once over all ranks, in centre crops; a bad record gets weight 0."""

    augment = None

    def __init__(
        self, config: RunConfig, split: Split, guard: BadRecordGuard, *, ranks: range, world_size: int
    ) -> None:
        self.split, self.interpolation, self._size = split, config.input.eval_interpolation, config.eval_image_size
        self._fraction, self._batch_size = config.evaluate.crop_fraction, config.evaluate.batch
        self._guard, self._ranks, self._world_size = guard, ranks, world_size

    def request_at(self, step: int) -> BatchRequest:
        parts = [
            evaluation_rows(len(self.split), step, rank, self._world_size, self._batch_size) for rank in self._ranks
        ]
        # Interleaved over the ranks, so that padding comes last; no result depends on the rank of a sample.
        rows, weights = (np.stack(columns, axis=1).reshape(-1) for columns in zip(*parts, strict=True))
        epochs = np.zeros_like(rows)
        return BatchRequest(step, rows, self._guard.substitute_all(rows, epochs), epochs, weights)

    def crops_of(self, step: int, rows: RowIndices, epochs: RowIndices) -> CropParamsBatch:
        return evaluation_crops(*_image_sizes(self.split, rows), size=self._size, fraction=self._fraction)

    def filters_of(self, rows: RowIndices, epochs: RowIndices) -> npt.NDArray[np.bool_]:
        return np.full(len(rows), self.interpolation == "bicubic")

    def image_size_at(self, step: int) -> int:
        return self._size

    def end_of_shape(self, start: int, stop: int) -> int:
        return stop

    def make_batch(self, request: BatchRequest, images: Any) -> Batch:
        good = request.rows == request.planned_rows
        self._guard.count_delivered(
            request.sample_count, request.sample_count - int(np.count_nonzero(good[: request.sample_count]))
        )
        return _build_batch(self.split, request, images, np.where(good, request.weights, np.float32(0)))


def _image_sizes(split: Split, rows: RowIndices) -> tuple[RowIndices, RowIndices]:
    return split.column("width")[rows].astype(np.int64), split.column("height")[rows].astype(np.int64)


def _build_batch(split: Split, request: BatchRequest, images: Any, weights: npt.NDArray[np.float32]) -> Batch:
    labels = split.labels[request.rows].astype(np.int64)
    return Batch(images, labels, split.keys[request.rows].astype(np.uint64), weights, request.step)
