"""What a loader is asked for: the samples of one step and what to make of each."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from podscale.config.run_config import RunConfig
from podscale.config.schedule import CropSection
from podscale.input.augment import Augmentation
from podscale.input.batch import Batch
from podscale.input.crop import CropParamsBatch, evaluation_crops, training_crops
from podscale.input.guard import BadRecordGuard
from podscale.order import Sampler, evaluation_rows
from podscale.shards.shardset import Split

RowIndices = npt.NDArray[np.int64]
ImagePhases = Sequence[tuple[int, int, CropSection]]
"""(first step, side of the images in pixels, random crop) of each phase of a training, in order."""


@dataclass(frozen=True)
class BatchRequest:
    """The slots of one process and step: rows int64 [n], epochs int64 [n], weights float32 [n].

    A weight of 0 is padding, at the end.
    rows may be substitutes; asked are the rows of the order.
    """

    step: int
    asked: RowIndices
    rows: RowIndices
    epochs: RowIndices
    weights: npt.NDArray[np.float32]

    @property
    def real(self) -> int:
        """Slots that hold a sample; the padding after them is not decoded."""
        return int(np.count_nonzero(self.weights))


class BatchPlan(Protocol):
    """Training or evaluation, as a loader sees it."""

    split: Split

    @property
    def augment(self) -> Augmentation | None:
        """What happens to an image after its crop, where anything does."""
        ...

    def size_at(self, step: int) -> int:
        """Side of the images of a step, in pixels."""
        ...

    def stretch(self, start: int, stop: int) -> int:
        """Where the run of steps from `start` on ends whose images have one size: at `stop` or before."""
        ...

    def at(self, step: int) -> BatchRequest: ...

    def views(self, step: int, rows: RowIndices, epochs: RowIndices) -> CropParamsBatch: ...

    def answer(self, request: BatchRequest, images: Any) -> Batch: ...


class TrainingBatchPlan:
    """These ranks' parts of each global batch, in random crops; a bad record counts as the sample that replaces it."""

    def __init__(
        self,
        config: RunConfig,
        split: Split,
        order: Sampler,
        guard: BadRecordGuard,
        *,
        phases: ImagePhases,
        ranks: range,
        world: int,
    ) -> None:
        self.split, self._phases = split, phases
        self._seed = config.run.seed
        self._order, self._guard, self._ranks, self._world = order, guard, ranks, world
        wanted = config.input.augment.wanted
        self.augment = Augmentation(config.input.augment, self._seed, config.input.mean) if wanted else None

    def at(self, step: int) -> BatchRequest:
        parts = [self._order.rank_batch(step, rank, self._world) for rank in self._ranks]
        asked, epochs = np.concatenate([p.rows for p in parts]), np.concatenate([p.epochs for p in parts])
        rows = self._guard.resolve(asked, epochs)
        return BatchRequest(step, asked, rows, epochs, np.ones(len(asked), dtype=np.float32))

    def views(self, step: int, rows: RowIndices, epochs: RowIndices) -> CropParamsBatch:
        keys, sizes = self.split.keys[rows], _image_sizes(self.split, rows)
        return training_crops(self._seed, epochs, keys, *sizes, crop=self.crop_at(step), size=self.size_at(step))

    def size_at(self, step: int) -> int:
        return self._phase_at(step)[1]

    def stretch(self, start: int, stop: int) -> int:
        size = self.size_at(start)
        return min((first for first, other, _ in self._phases if start < first < stop and other != size), default=stop)

    def crop_at(self, step: int) -> CropSection:
        """The augmentation of global batch `step`: that of the phase which the whole batch belongs to."""
        return self._phase_at(step)[2]

    def _phase_at(self, step: int) -> tuple[int, int, CropSection]:
        return next(phase for phase in reversed(self._phases) if step >= phase[0])

    def answer(self, request: BatchRequest, images: Any) -> Batch:
        self._guard.delivered(request.real, int(np.count_nonzero(request.rows != request.asked)))
        return _build_batch(self.split, request, images, request.weights)


class EvaluationBatchPlan:
    """Every sample of a split once over all ranks, in centre crops; a bad record weighs nothing."""

    augment = None

    def __init__(self, config: RunConfig, split: Split, guard: BadRecordGuard, *, ranks: range, world: int) -> None:
        self.split, self._size = split, config.eval_image_size
        self._fraction, self._length = config.evaluate.crop_fraction, config.evaluate.batch
        self._guard, self._ranks, self._world = guard, ranks, world

    def at(self, step: int) -> BatchRequest:
        parts = [evaluation_rows(len(self.split), step, rank, self._world, self._length) for rank in self._ranks]
        # In ascending order over the ranks, so that padding comes last; no result depends on which computes what.
        rows, weights = (np.stack(columns, axis=1).reshape(-1) for columns in zip(*parts, strict=True))
        epochs = np.zeros_like(rows)
        return BatchRequest(step, rows, self._guard.resolve(rows, epochs), epochs, weights)

    def views(self, step: int, rows: RowIndices, epochs: RowIndices) -> CropParamsBatch:
        return evaluation_crops(*_image_sizes(self.split, rows), size=self._size, fraction=self._fraction)

    def size_at(self, step: int) -> int:
        return self._size

    def stretch(self, start: int, stop: int) -> int:
        return stop

    def answer(self, request: BatchRequest, images: Any) -> Batch:
        good = request.rows == request.asked
        self._guard.delivered(request.real, request.real - int(np.count_nonzero(good[: request.real])))
        return _build_batch(self.split, request, images, np.where(good, request.weights, np.float32(0)))


def _image_sizes(split: Split, rows: RowIndices) -> tuple[RowIndices, RowIndices]:
    return split.column("width")[rows].astype(np.int64), split.column("height")[rows].astype(np.int64)


def _build_batch(split: Split, request: BatchRequest, images: Any, weights: npt.NDArray[np.float32]) -> Batch:
    labels = split.labels[request.rows].astype(np.int64)
    return Batch(images, labels, split.keys[request.rows].astype(np.uint64), weights, request.step)
