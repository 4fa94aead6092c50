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

from podscale.data.loaders.base import Batch, Loader
from podscale.data.sampler import evaluation_steps
from podscale.distributed.waits import EVALUATION, waiting_for
from podscale.pytorch.device_prefetcher import DeviceBatch, DevicePrefetcher, Normalise
from podscale.pytorch.precision import Precision
from podscale.pytorch.world import World
from podscale.runs.predictions import Predictions
from podscale.training.run_progress import BATCHES_PER_STOP_CHECK, TOP_K, EvaluationResult, evaluation_result
from podscale.training.training_logger import PhaseTimer
from podscale.util import progress_reports

PredictionColumns = dict[str, np.ndarray]
"""Rows of some samples, by the names of `Predictions`."""


@dataclass(frozen=True)
class BatchPredictions:
    """What the model says about one batch: topk int64 [n, k], confidences float32 [n, k], losses float32 [n]."""

    topk: Tensor
    confidences: Tensor
    losses: Tensor


class Evaluator:
    """Runs a model over the validation split; every rank takes part and takes as many steps as the others.

    Padding at the end of the split carries weight 0 and counts nowhere. Batch norm uses its running statistics, and
    losses are without label smoothing.
    """

    def __init__(
        self,
        loader: Loader,
        count: int,
        batch: int,
        prefetcher: DevicePrefetcher,
        normalise: Normalise,
        precision: Precision,
        world: World,
        count_images: Callable[[int], None] = lambda images: None,
        *,
        flip: bool = False,
    ) -> None:
        """count_images: hears how many samples of this rank each batch held. flip: average with mirrored images."""
        self._count_images, self._flip = count_images, flip
        self._loader, self._prefetcher, self._normalise = loader, prefetcher, normalise
        self._precision, self._world = precision, world
        self._steps = evaluation_steps(count, world.size, batch)
        self.count, self._batch = count, batch
        self._report = progress_reports.progress_from_env() if world.is_rank0 else progress_reports.ignore_progress

    @waiting_for(EVALUATION)
    def evaluate(
        self, model: nn.Module, phase: PhaseTimer, stop_requested: Callable[[], bool] | None = None
    ) -> EvaluationResult | None:
        """Accuracy and loss over the whole split, the same on all ranks.

        stop_requested: asked now and then; where any rank says yes, all give up together and None is returned.
        """
        started = time.perf_counter()
        sums = torch.zeros(4, dtype=torch.float64, device=self._world.device)  # top-1, top-5, loss, images
        for number, (batch, answers) in enumerate(self._batch_predictions(model, phase)):
            if (
                stop_requested is not None
                and number % BATCHES_PER_STOP_CHECK == 0
                and self._any_rank_stops(stop_requested())
            ):
                return None
            weights = torch.from_numpy(batch.host_batch.weights).to(self._world.device, torch.float64)
            hits = answers.topk == batch.labels[:, None]
            sums[0] += weights @ hits[:, 0].double()
            sums[1] += weights @ hits.any(dim=1).double()
            sums[2] += weights @ answers.losses.double()
            sums[3] += weights.sum()
        dist.all_reduce(sums)
        return evaluation_result(sums.tolist(), self.count, time.perf_counter() - started)

    def _any_rank_stops(self, stop: bool) -> bool:
        """Whether any rank wants to stop; on the host, so that no device is waited for."""
        word = torch.tensor([int(stop)], dtype=torch.int32)
        dist.all_reduce(word, dist.ReduceOp.MAX)
        return bool(word.item())

    @waiting_for(EVALUATION)
    def predict(self, model: nn.Module, phase: PhaseTimer) -> Predictions | None:
        """The predictions of the whole split on rank 0, None elsewhere."""
        return self.gather(
            [prediction_columns(batch.host_batch, answers) for batch, answers in self._batch_predictions(model, phase)]
        )

    @waiting_for(EVALUATION)
    def gather(self, parts: Sequence[PredictionColumns]) -> Predictions | None:
        """The whole split's on rank 0, of the batches of each rank; all ranks call it."""
        mine = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        gathered: list[dict[str, np.ndarray]] | None = [{}] * self._world.size if self._world.is_rank0 else None
        dist.gather_object(mine, gathered)
        if gathered is None:
            return None
        whole = {name: np.concatenate([columns[name] for columns in gathered]) for name in mine}
        return Predictions(**whole)

    def _batch_predictions(self, model: nn.Module, phase: PhaseTimer) -> Iterator[tuple[DeviceBatch, BatchPredictions]]:
        for batch, logits in self.logits(model, phase):
            yield batch, batch_predictions(logits, batch.labels)

    def logits(self, model: nn.Module, phase: PhaseTimer) -> Iterator[tuple[DeviceBatch, Tensor]]:
        """What the model says of each batch of this rank: [n, classes]; the same batches every time."""
        with eval_mode(model), torch.inference_mode():
            ticker = progress_reports.ProgressReporter("evaluate", self._report, self.count)
            for step, batch in enumerate(self._prefetcher(self._loader.batches(0, self._steps), phase), start=1):
                with self._precision.autocast():
                    logits = self._logits(model, self._normalise(batch.images))
                yield batch, logits
                self._count_images(int(np.count_nonzero(batch.host_batch.weights)))
                ticker.set(min(self.count, step * self._batch * self._world.size), 0, 0)
            ticker.close()

    def _logits(self, model: nn.Module, images: Tensor) -> Tensor:
        logits: Tensor = model(images)
        return (logits + model(images.flip(3))) / 2 if self._flip else logits


def batch_predictions(logits: Tensor, labels: Tensor) -> BatchPredictions:
    """The most probable classes, best first; among equals the lower index, whatever the device."""
    logits = logits.float()
    log_probabilities = F.log_softmax(logits, dim=1)
    confidences, topk = log_probabilities.sort(dim=1, descending=True, stable=True)
    best = min(TOP_K, logits.shape[1])
    losses = -log_probabilities.gather(1, labels[:, None])[:, 0]
    return BatchPredictions(topk[:, :best], confidences[:, :best].exp(), losses)


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode, and back in the mode it was in."""
    before = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(before)


def prediction_columns(batch: Batch, predictions: BatchPredictions) -> PredictionColumns:
    """The rows of one batch that are samples, by the names of `Predictions`."""
    real = batch.weights > 0
    return {
        "keys": batch.keys[real],
        "labels": batch.labels[real].astype(np.int32),
        "topk": predictions.topk.cpu().numpy()[real].astype(np.int32),
        "confidences": predictions.confidences.cpu().numpy()[real],
        "losses": predictions.losses.cpu().numpy()[real],
    }
