"""Evaluation over all devices, every sample once: as accuracy and loss during training, as predictions afterwards."""

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import Array, lax, nn
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from podscale.config import RunConfig
from podscale.data.loaders.base import Batch
from podscale.data.loaders.build_loader import build_evaluation_loader
from podscale.data.sampler import evaluation_steps
from podscale.data.shard_set import ShardSet
from podscale.distributed.waits import EVALUATION, waiting_for
from podscale.jax.device_prefetcher import (
    LOADER_DEVICE,
    DeviceBatches,
    DevicePrefetcher,
    GlobalBatches,
    normalise,
)
from podscale.jax.flat_buffers import Buckets, ParamLayout
from podscale.jax.mesh import RANKS, REPLICATED, assemble_array, axis_size
from podscale.jax.models import Arrays, build_model, choose_convolution
from podscale.jax.out_of_memory import explain_evaluation_memory
from podscale.jax.precision import compute_dtype, exact_products
from podscale.jax.program_cache import synchronize_first_call
from podscale.jax.train_step import NamedArrays
from podscale.jax.world import World, loader_ranks
from podscale.runs.predictions import PREDICTION_COLUMNS, Predictions
from podscale.training.run_progress import BATCHES_PER_STOP_CHECK, TOP_K, EvaluationResult, evaluation_result
from podscale.training.step_timer import PhaseTimer
from podscale.util import progress_reports

Values = npt.NDArray[Any]
EVALUATION_BATCH_SPECS: Any = GlobalBatches(PartitionSpec(None, RANKS), PartitionSpec(None, RANKS))  # type: ignore[arg-type]
"""Sharding of batches: devices that share images in training all evaluate the same whole images."""


class BatchPredictions(NamedTuple):
    """Predictions of one batch, of each rank of the mesh for its images.

    Args:
        topk: most probable classes, int32 [n, k].
        confidences: their probabilities, fp32 [n, k].
        losses: cross entropy, fp32 [n].
        stop: 1 if any rank was asked to stop, int32 [1].
    """

    topk: Array
    confidences: Array
    losses: Array
    stop: Array


class Evaluator:
    """Evaluator of a model over the validation split; every process runs the same number of steps.

    Padding at the end of the split has weight 0. Batch norm uses its running statistics, and losses are without label
    smoothing. The host sums in double precision, so results are the same on all processes.
    """

    def __init__(
        self,
        config: RunConfig,
        world: World,
        mesh: Mesh,
        layout: ParamLayout,
        shard_set: ShardSet,
        count_images: Callable[[int], None] = lambda images: None,
    ) -> None:
        """Open the loader; `count_images` is called with the number of this process's samples in each batch."""
        split, ranks = shard_set.split("validation"), axis_size(mesh, RANKS)
        self.loader = build_evaluation_loader(
            config, split, ranks=loader_ranks(world, mesh), world_size=ranks, device=LOADER_DEVICE
        )
        self._count_images, self._world = count_images, world
        self._prefetcher = DevicePrefetcher(mesh, specs=EVALUATION_BATCH_SPECS)
        self._eval_step = synchronize_first_call(build_eval_step(config, mesh, layout), world, "the first evaluation")
        self._no_stop, self._stop = (_stop_flags(mesh, self._prefetcher.local_ranks, value) for value in (0, 1))
        self.count, self._images = len(split), config.evaluate.batch * ranks
        self._steps = evaluation_steps(self.count, ranks, config.evaluate.batch)
        self._report = progress_reports.progress_from_env() if world.is_rank0 else progress_reports.ignore_progress

    def close(self) -> None:
        self.loader.close()

    @waiting_for(EVALUATION)
    def evaluate(
        self,
        buckets: Buckets,
        statistics: NamedArrays,
        phase: PhaseTimer,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> EvaluationResult | None:
        """Return accuracy and loss of unsharded weights over the whole split, the same on all processes.

        `stop_requested` is called every few batches; if it returns True on any process, all processes return None.
        """
        started = time.perf_counter()
        local_sums = np.zeros(4)  # top-1, top-5, loss, images
        for batch, columns in self._iter_batches(buckets, statistics, phase, stop_requested):
            if columns is None:
                return None
            weights = batch.weights.astype(np.float64)
            hits = columns["topk"] == batch.labels[:, None]
            local_sums += [weights @ hits[:, 0], weights @ hits.any(axis=1), weights @ columns["losses"], weights.sum()]
        sums = np.sum(self._world.gather(local_sums.tolist()), axis=0)
        return evaluation_result(sums.tolist(), self.count, time.perf_counter() - started)

    @waiting_for(EVALUATION)
    def predict(self, buckets: Buckets, statistics: NamedArrays, phase: PhaseTimer) -> Predictions | None:
        """Return the predictions of the whole split on process 0, None on other processes."""
        parts: list[dict[str, Values]] = []
        for batch, batch_columns in self._iter_batches(buckets, statistics, phase, lambda: False):
            assert batch_columns is not None, "no stop was requested"
            parts.append({"keys": batch.keys, "labels": batch.labels, "weights": batch.weights, **batch_columns})
        columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        columns |= {name: columns[name].astype(dtype) for name, dtype in PREDICTION_COLUMNS.items()}
        if self._world.size > 1:
            as_words = {name: column.view(np.uint32) for name, column in columns.items()}  # jax has no 64 bits here
            gathered = multihost_utils.process_allgather(as_words, tiled=True)
            columns = {name: np.asarray(gathered[name]).view(column.dtype) for name, column in columns.items()}
        is_sample = columns.pop("weights") > 0
        if not self._world.is_rank0:
            return None
        return Predictions(**{name: column[is_sample] for name, column in columns.items()})

    def _iter_batches(
        self, buckets: Buckets, statistics: NamedArrays, phase: PhaseTimer, stop_requested: Callable[[], bool]
    ) -> Iterator[tuple[Batch, dict[str, Values] | None]]:
        """Yield each batch with its predictions, read when the next batch is dispatched; None if all stop."""
        reporter = progress_reports.ProgressReporter("evaluate", self._report, self.count)
        pending: list[tuple[DeviceBatches, BatchPredictions]] = []
        step = 0

        def read() -> Iterator[tuple[Batch, dict[str, Values] | None]]:
            nonlocal step
            batches, predictions = pending.pop(0)
            batch, step = batches.host_batches[0], step + 1
            if np.asarray(predictions.stop)[0]:
                yield batch, None
                return
            yield batch, {name: local_rows(getattr(predictions, name)) for name in ("topk", "confidences", "losses")}
            self._count_images(int(np.count_nonzero(batch.weights)))
            reporter.set(min(self.count, step * self._images), 0, 0)

        for number, batches in enumerate(self._prefetcher(self.loader.batches(0, self._steps), phase)):
            stop = self._stop if number % BATCHES_PER_STOP_CHECK == 0 and stop_requested() else self._no_stop
            with explain_evaluation_memory():
                pending.append((batches, self._eval_step(buckets, statistics, *batches.device_batches, stop)))
            if len(pending) > 1:
                yield from read()
        yield from read()
        reporter.close()


def build_eval_step(config: RunConfig, mesh: Mesh, layout: ParamLayout) -> Callable[..., BatchPredictions]:
    """Return the program (buckets, statistics, images, labels, stop) -> predictions of a batch on the mesh.

    It takes buckets of unsharded weights, so that training needs no program that unpacks them first.
    """
    apply = build_model(
        config.model,
        dtype=compute_dtype(config.train),
        stem=config.train.stem_compute,
        convolve=choose_convolution(mesh),
    )

    def predict(buckets: Buckets, statistics: Arrays, images: Array, labels: Array, stop: Array) -> BatchPredictions:
        with exact_products(config.train):
            floats = normalise(images[0], config.input)
            views = [floats, floats[:, :, ::-1]] if config.evaluate.flip else [floats]
            logits, _ = apply(layout.unpack(buckets), statistics, jnp.concatenate(views), train=False)
            logits = logits.reshape(len(views), len(floats), -1).mean(0)
        return BatchPredictions(*batch_predictions(logits, labels[0]), lax.pmax(stop, RANKS))

    ranks = PartitionSpec(RANKS)
    of_specs: Any = BatchPredictions
    return jax.jit(
        jax.shard_map(
            predict,
            mesh=mesh,
            in_specs=(REPLICATED, REPLICATED, *EVALUATION_BATCH_SPECS, ranks),
            out_specs=of_specs(ranks, ranks, ranks, REPLICATED),
        )
    )


def batch_predictions(logits: Array, labels: Array) -> tuple[Array, Array, Array]:
    """Return the most probable classes, best first (of equal ones the lower index), their probabilities, and losses.

    Args:
        logits: [n, classes], any float dtype.
        labels: int32 [n].
    """
    log_probs = nn.log_softmax(logits.astype(jnp.float32))
    confidences, topk = lax.top_k(log_probs, min(TOP_K, logits.shape[1]))
    losses = -jnp.take_along_axis(log_probs, labels[:, None], axis=1)[:, 0]
    return topk, jnp.exp(confidences), losses


def local_rows(array: Array) -> Values:
    """Return this process's rows of `array`, sharded by its first dimension, in mesh order; replicated rows once."""
    parts = {shard.index[0].start or 0: shard.data for shard in array.addressable_shards}
    return np.concatenate([np.asarray(parts[start]) for start in sorted(parts)])


def _stop_flags(mesh: Mesh, local_ranks: int, value: int) -> Array:
    sharding = NamedSharding(mesh, PartitionSpec(RANKS))
    return assemble_array(np.full(local_ranks, value, np.int32), sharding, dim=0, length=axis_size(mesh, RANKS))
