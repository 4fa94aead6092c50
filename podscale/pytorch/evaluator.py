"""Evaluation over all ranks, every sample once: as accuracy and loss during training, as predictions afterwards."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F

from podscale.config import RunConfig
from podscale.data.loaders.base import Batch
from podscale.data.loaders.build_loader import build_evaluation_loader
from podscale.data.sampler import evaluation_steps
from podscale.data.shard_set import ShardSet
from podscale.distributed.waits import EVALUATION, waiting_for
from podscale.pytorch.device_prefetcher import DeviceBatch, DevicePrefetcher, Normalise
from podscale.pytorch.precision import Precision
from podscale.pytorch.world import World
from podscale.runs.predictions import INVERSE_TEMPERATURES, TEMPERED_LOSSES, Predictions
from podscale.training.run_progress import BATCHES_PER_STOP_CHECK, TOP_K, EvaluationResult, evaluation_result
from podscale.training.step_timer import PhaseTimer
from podscale.util import progress_reports

PredictionColumns = dict[str, np.ndarray]
"""Rows of some samples, by the names of `Predictions`."""


@dataclass(frozen=True)
class BatchPredictions:
    """Predictions of one batch: topk int64 [n, k], confidences float32 [n, k], losses float32 [n]."""

    topk: Tensor
    confidences: Tensor
    losses: Tensor


class Evaluator:
    """Evaluator of a model over the validation split; every rank runs the same number of steps.

    Padding at the end of the split carries weight 0 and counts nowhere. Batch norm uses its running statistics, and
    losses are without label smoothing.
    """

    def __init__(
        self,
        config: RunConfig,
        world: World,
        shard_set: ShardSet,
        precision: Precision,
        prefetcher: DevicePrefetcher,
        count_images: Callable[[int], None] = lambda images: None,
    ) -> None:
        """Open the loader; `count_images` is called with the number of this rank's samples in each batch."""
        split = shard_set.split("validation")
        self.loader = build_evaluation_loader(
            config, split, ranks=world.ranks, world_size=world.size, device=str(world.device)
        )
        self.precision, self.prefetcher, self._world, self._count_images = precision, prefetcher, world, count_images
        self._normalise = Normalise(config.input, world, channels_last=config.train.channels_last)
        self.count, self._batch, self._flip = len(split), config.evaluate.batch, config.evaluate.flip
        self._steps = evaluation_steps(self.count, world.size, self._batch)
        self._report = progress_reports.progress_from_env() if world.is_rank0 else progress_reports.ignore_progress

    def close(self) -> None:
        self.loader.close()

    @waiting_for(EVALUATION)
    def evaluate(
        self, model: nn.Module, phase: PhaseTimer, stop_requested: Callable[[], bool] = lambda: False
    ) -> EvaluationResult | None:
        """Return accuracy and loss over the whole split on all ranks, None if `stop_requested` is True on any rank."""
        started = time.perf_counter()
        sums = torch.zeros(4, dtype=torch.float64, device=self._world.device)  # top-1, top-5, loss, images
        for number, (batch, logits) in enumerate(self.logits(model, phase)):
            predictions = batch_predictions(logits, batch.labels)
            if number % BATCHES_PER_STOP_CHECK == 0 and self._any_rank_stops(stop_requested()):
                return None
            weights = self.prefetcher.copy_to_device(torch.from_numpy(batch.host_batch.weights)).double()
            hits = predictions.topk == batch.labels[:, None]
            sums[0] += weights @ hits[:, 0].double()
            sums[1] += weights @ hits.any(dim=1).double()
            sums[2] += weights @ predictions.losses.double()
            sums[3] += weights.sum()
        dist.all_reduce(sums)
        return evaluation_result(sums.tolist(), self.count, time.perf_counter() - started)

    def _any_rank_stops(self, stop: bool) -> bool:
        """Return True on all ranks if any rank stops. The hosts exchange it, so no host waits for its device."""
        flag = torch.tensor([int(stop)], dtype=torch.int32)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag.item())

    @waiting_for(EVALUATION)
    def predict(self, model: nn.Module, phase: PhaseTimer) -> Predictions | None:
        """Return the predictions of the whole split on rank 0, None on other ranks."""
        return self.gather(
            [
                prediction_columns(batch.host_batch, batch_predictions(logits, batch.labels))
                | tempered_columns(batch.host_batch, logits, batch.labels)
                for batch, logits in self.logits(model, phase)
            ]
        )

    @waiting_for(EVALUATION)
    def gather(self, parts: Sequence[PredictionColumns]) -> Predictions | None:
        """Return the predictions of the whole split on rank 0, from the batches of each rank. All ranks call it."""
        local = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        by_rank: list[PredictionColumns] | None = [{}] * self._world.size if self._world.is_rank0 else None
        dist.gather_object(local, by_rank)
        if by_rank is None:
            return None
        return Predictions(**{name: np.concatenate([columns[name] for columns in by_rank]) for name in local})

    def logits(self, model: nn.Module, phase: PhaseTimer) -> Iterator[tuple[DeviceBatch, Tensor]]:
        """Yield each batch of this rank with its logits, [n, classes]; the same batches every time."""
        with eval_mode(model), torch.inference_mode():
            reporter = progress_reports.ProgressReporter("evaluate", self._report, self.count)
            for step, batch in enumerate(self.prefetcher(self.loader.batches(0, self._steps), phase), start=1):
                with self.precision.autocast():
                    logits = mean_logits(model, self._normalise(batch.images), flip=self._flip)
                yield batch, logits
                self._count_images(int(np.count_nonzero(batch.host_batch.weights)))
                reporter.set(min(self.count, step * self._batch * self._world.size), 0, 0)
            reporter.close()


def mean_logits(model: nn.Module, images: Tensor, *, flip: bool) -> Tensor:
    """Return the logits of normalised images; with `flip`, the mean with those of the mirrored images."""
    logits: Tensor = model(images)
    return (logits + model(images.flip(3))) / 2 if flip else logits


def batch_predictions(logits: Tensor, labels: Tensor) -> BatchPredictions:
    """Return the most probable classes, best first; of equal ones the lower index first, on any device.

    Args:
        logits: [n, classes], any float dtype.
        labels: int64 [n].
    """
    logits = logits.float()
    log_probabilities = F.log_softmax(logits, dim=1)
    confidences, topk = log_probabilities.sort(dim=1, descending=True, stable=True)
    best = min(TOP_K, logits.shape[1])
    losses = -log_probabilities.gather(1, labels[:, None])[:, 0]
    return BatchPredictions(topk[:, :best], confidences[:, :best].exp(), losses)


def tempered_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the losses [n, 25] with the logits times each of INVERSE_TEMPERATURES.

    Args:
        logits: [n, classes], any float dtype.
        labels: int64 [n].
    """
    log_probabilities = F.log_softmax(logits.float(), dim=1)
    factors: list[float] = INVERSE_TEMPERATURES.tolist()
    columns = [F.cross_entropy(factor * log_probabilities, labels, reduction="none") for factor in factors]
    return torch.stack(columns, dim=1)


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode, and restore its mode at the end of the block."""
    before = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(before)


def prediction_columns(batch: Batch, predictions: BatchPredictions) -> PredictionColumns:
    """Return the rows of one batch by the names of `Predictions`, without padding."""
    is_sample = batch.weights > 0
    return {
        "keys": batch.keys[is_sample],
        "labels": batch.labels[is_sample].astype(np.int32),
        "topk": predictions.topk.cpu().numpy()[is_sample].astype(np.int32),
        "confidences": predictions.confidences.cpu().numpy()[is_sample],
        "losses": predictions.losses.cpu().numpy()[is_sample],
    }


def tempered_columns(batch: Batch, logits: Tensor, labels: Tensor) -> PredictionColumns:
    """Return `tempered_losses` of one batch by their name in `Predictions`, without padding.

    Args:
        logits: [n, classes], any float dtype.
        labels: int64 [n].
    """
    return {TEMPERED_LOSSES: tempered_losses(logits, labels).cpu().numpy()[batch.weights > 0]}
