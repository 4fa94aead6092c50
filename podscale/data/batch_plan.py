"""Batch plan: the samples of one step, with their crops and augmentations, that a loader decodes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from podscale.config.run_config import RunConfig
from podscale.config.schedule import CropSection
from podscale.data.augment import Augmentation
from podscale.data.crop import CropParamsBatch, evaluation_crops, training_crops
from podscale.data.loaders.base import BadRecordGuard, Batch
from podscale.data.sampler import Sampler, evaluation_rows
from podscale.data.shard_set import Split

RowIndices = npt.NDArray[np.int64]
ImagePhases = Sequence[tuple[int, int, CropSection]]
"""(first step, side of the images in pixels, random crop) of each phase of a training, in order."""


@dataclass(frozen=True)
class BatchRequest:
    """Slots of one process and step: rows int64 [n], epochs int64 [n], weights float32 [n] (0: padding, at the end).

    `rows` has substitutes in place of the bad records of `planned_rows`.
    """

    step: int
    planned_rows: RowIndices
    rows: RowIndices
    epochs: RowIndices
    weights: npt.NDArray[np.float32]

    @property
    def sample_count(self) -> int:
        """Number of slots without the padding, which is not decoded."""
        return int(np.count_nonzero(self.weights))


class BatchPlan(Protocol):
    """Plan of a training or an evaluation, for a loader."""

    split: Split

    @property
    def augment(self) -> Augmentation | None:
        """Augmentation after the crop; None: no augmentation."""
        ...

    def image_size_at(self, step: int) -> int:
        """Return the side of the images of a step, in pixels."""
        ...

    def steps_of_one_size(self, start: int, stop: int) -> int:
        """Return the first step after `start` with another image size, at most `stop`."""
        ...

    def request_at(self, step: int) -> BatchRequest: ...

    def crops_of(self, step: int, rows: RowIndices, epochs: RowIndices) -> CropParamsBatch: ...

    def make_batch(self, request: BatchRequest, images: Any) -> Batch: ...


class TrainingBatchPlan:
    """Parts of `ranks` of each global batch, in random crops; a bad record counts as its substitute."""

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
        self.split, self._phases = split, phases
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

    def image_size_at(self, step: int) -> int:
        return self._phase_at(step)[1]

    def steps_of_one_size(self, start: int, stop: int) -> int:
        size = self.image_size_at(start)
        return min((first for first, other, _ in self._phases if start < first < stop and other != size), default=stop)

    def crop_at(self, step: int) -> CropSection:
        return self._phase_at(step)[2]

    def _phase_at(self, step: int) -> tuple[int, int, CropSection]:
        return next(phase for phase in reversed(self._phases) if step >= phase[0])

    def make_batch(self, request: BatchRequest, images: Any) -> Batch:
        self._guard.count_delivered(request.sample_count, int(np.count_nonzero(request.rows != request.planned_rows)))
        return _build_batch(self.split, request, images, request.weights)


class EvaluationBatchPlan:
    """Every sample of a split once over all ranks, in centre crops; a bad record has weight 0."""

    augment = None

    def __init__(
        self, config: RunConfig, split: Split, guard: BadRecordGuard, *, ranks: range, world_size: int
    ) -> None:
        self.split, self._size = split, config.eval_image_size
        self._fraction, self._batch_size = config.evaluate.crop_fraction, config.evaluate.batch
        self._guard, self._ranks, self._world_size = guard, ranks, world_size

    def request_at(self, step: int) -> BatchRequest:
        parts = [
            evaluation_rows(len(self.split), step, rank, self._world_size, self._batch_size) for rank in self._ranks
        ]
        # In ascending order over the ranks, so that padding comes last; no result depends on a sample's rank.
        rows, weights = (np.stack(columns, axis=1).reshape(-1) for columns in zip(*parts, strict=True))
        epochs = np.zeros_like(rows)
        return BatchRequest(step, rows, self._guard.substitute_all(rows, epochs), epochs, weights)

    def crops_of(self, step: int, rows: RowIndices, epochs: RowIndices) -> CropParamsBatch:
        return evaluation_crops(*_image_sizes(self.split, rows), size=self._size, fraction=self._fraction)

    def image_size_at(self, step: int) -> int:
        return self._size

    def steps_of_one_size(self, start: int, stop: int) -> int:
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
