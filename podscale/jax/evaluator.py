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
from podscale.data.loaders.base import Batch, Loader
from podscale.data.sampler import evaluation_steps
from podscale.distributed.waits import EVALUATION, waiting_for
from podscale.jax.device_prefetcher import DeviceBatches, DevicePrefetcher, GlobalBatches, normalise
from podscale.jax.flat_buffers import Buckets, ParamLayout
from podscale.jax.mesh import RANKS, REPLICATED, assemble_array, axis_size
from podscale.jax.models import Arrays, build_model, choose_convolution
from podscale.jax.out_of_memory import explain_evaluation_memory
from podscale.jax.precision import compute_dtype, exact_products
from podscale.jax.program_cache import synchronize_first_call
from podscale.jax.train_step import NamedArrays
from podscale.jax.world import World
from podscale.runs.predictions import PREDICTION_COLUMNS, Predictions
from podscale.training.run_progress import BATCHES_PER_STOP_CHECK, TOP_K, EvaluationResult, evaluation_result
from podscale.training.training_logger import PhaseTimer
from podscale.util import progress_reports

Values = npt.NDArray[Any]
EVALUATION_BATCH_SPECS: Any = GlobalBatches(PartitionSpec(None, RANKS), PartitionSpec(None, RANKS))  # type: ignore[arg-type]
"""How batches lie on the mesh: devices that share images in training all see the same whole ones here."""


class BatchPredictions(NamedTuple):
    """What the model says about one batch, each rank of the mesh about its images.

    topk: int32 [n, k]. confidences: fp32 [n, k]. losses: fp32 [n]. stop: int32 [1], whether any rank was asked to.
    """

    topk: Array
    confidences: Array
    losses: Array
    stop: Array


class Evaluator:
    """Runs a model over the validation split; every process takes part and takes as many steps as the others.

    Padding at the end of the split carries weight 0 and counts nowhere. Batch norm uses its running statistics, and
    losses are without label smoothing. Sums are the host's, in double precision, so they are the same on all processes.
    """

    def __init__(
        self,
        config: RunConfig,
        mesh: Mesh,
        layout: ParamLayout,
        loader: Loader,
        count: int,
        world: World,
        count_images: Callable[[int], None] = lambda images: None,
    ) -> None:
        """layout: of the weights' buckets. count: of the split. count_images: hears how many samples of this process
        each batch held."""
        self._count_images, self._loader, self._world = count_images, loader, world
        self._prefetcher = DevicePrefetcher(mesh, specs=EVALUATION_BATCH_SPECS)
        self._eval_step = synchronize_first_call(build_eval_step(config, mesh, layout), world, "the first evaluation")
        ranks = axis_size(mesh, RANKS)
        self._no_stop, self._stop_asked = (_stop_flags(mesh, self._prefetcher.local_ranks, value) for value in (0, 1))
        self._steps, self._images = evaluation_steps(count, ranks, config.evaluate.batch), config.evaluate.batch * ranks
        self.count = count
        self._report = progress_reports.progress_from_env() if world.is_rank0 else progress_reports.ignore_progress

    @waiting_for(EVALUATION)
    def evaluate(
        self,
        buckets: Buckets,
        statistics: NamedArrays,
        phase: PhaseTimer,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> EvaluationResult | None:
        """Accuracy and loss over the whole split, the same on all processes.

        stop_requested: asked now and then; where any process says yes, all give up together and None is returned.
        """
        started = time.perf_counter()
        sums = np.zeros(4)  # top-1, top-5, loss, images
        for batch, answers in self._iter_batches(buckets, statistics, phase, stop_requested):
            if answers is None:
                return None
            weights = batch.weights.astype(np.float64)
            hits = answers["topk"] == batch.labels[:, None]
            sums += [weights @ hits[:, 0], weights @ hits.any(axis=1), weights @ answers["losses"], weights.sum()]
        whole = np.sum(self._world.gather(sums.tolist()), axis=0)
        return evaluation_result(whole.tolist(), self.count, time.perf_counter() - started)

    @waiting_for(EVALUATION)
    def predict(self, buckets: Buckets, statistics: NamedArrays, phase: PhaseTimer) -> Predictions | None:
        """The predictions of the whole split on process 0, None elsewhere."""
        parts: list[dict[str, Values]] = []
        for batch, answers in self._iter_batches(buckets, statistics, phase, lambda: False):
            assert answers is not None, "nobody asked to stop"
            parts.append({"keys": batch.keys, "labels": batch.labels, "weights": batch.weights, **answers})
        columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        columns |= {name: columns[name].astype(dtype) for name, dtype in PREDICTION_COLUMNS.items()}
        if self._world.size > 1:
            as_words = {name: column.view(np.uint32) for name, column in columns.items()}  # jax has no 64 bits here
            gathered = multihost_utils.process_allgather(as_words, tiled=True)
            columns = {name: np.asarray(gathered[name]).view(column.dtype) for name, column in columns.items()}
        real = columns.pop("weights") > 0
        return Predictions(**{name: column[real] for name, column in columns.items()}) if self._world.is_rank0 else None

    def _iter_batches(
        self, buckets: Buckets, statistics: NamedArrays, phase: PhaseTimer, stop_requested: Callable[[], bool]
    ) -> Iterator[tuple[Batch, dict[str, Values] | None]]:
        """Each batch with what the model says about it, read when the next one is on its way; None: all stop."""
        ticker = progress_reports.ProgressReporter("evaluate", self._report, self.count)
        waiting: list[tuple[DeviceBatches, BatchPredictions]] = []
        step = 0

        def read() -> Iterator[tuple[Batch, dict[str, Values] | None]]:
            nonlocal step
            batches, answers = waiting.pop(0)
            batch, step = batches.host_batches[0], step + 1
            if np.asarray(answers.stop)[0]:
                yield batch, None
                return
            yield batch, {name: local_rows(getattr(answers, name)) for name in ("topk", "confidences", "losses")}
            self._count_images(int(np.count_nonzero(batch.weights)))
            ticker.set(min(self.count, step * self._images), 0, 0)

        for number, batches in enumerate(self._prefetcher(self._loader.batches(0, self._steps), phase)):
            stops = self._stop_asked if number % BATCHES_PER_STOP_CHECK == 0 and stop_requested() else self._no_stop
            with explain_evaluation_memory():
                waiting.append((batches, self._eval_step(buckets, statistics, *batches.device_batches, stops)))
            if len(waiting) > 1:
                yield from read()
        yield from read()
        ticker.close()


def build_eval_step(config: RunConfig, mesh: Mesh, layout: ParamLayout) -> Callable[..., BatchPredictions]:
    """(buckets, statistics, images, labels, stops): what a document's network says about a batch on the mesh.

    buckets: of all weights, whole; so a training evaluates what it has, without a program that unpacks it first.
    """
    apply = build_model(
        config.model,
        dtype=compute_dtype(config.train),
        stem=config.train.stem_compute,
        convolve=choose_convolution(mesh),
    )

    def answers(buckets: Buckets, statistics: Arrays, images: Array, labels: Array, stops: Array) -> BatchPredictions:
        with exact_products(config.train):
            floats = normalise(images[0], config.input)
            ways = [floats, floats[:, :, ::-1]] if config.evaluate.flip else [floats]
            logits, _ = apply(layout.unpack(buckets), statistics, jnp.concatenate(ways), train=False)
            logits = logits.reshape(len(ways), len(floats), -1).mean(0)
        return BatchPredictions(*batch_predictions(logits, labels[0]), lax.pmax(stops, RANKS))

    ranks = PartitionSpec(RANKS)
    lie: Any = BatchPredictions
    return jax.jit(
        jax.shard_map(
            answers,
            mesh=mesh,
            in_specs=(REPLICATED, REPLICATED, *EVALUATION_BATCH_SPECS, ranks),
            out_specs=lie(ranks, ranks, ranks, REPLICATED),
        )
    )


def batch_predictions(logits: Array, labels: Array) -> tuple[Array, Array, Array]:
    """The most probable classes, best first and among equals the lower index; their probabilities; losses."""
    chances = nn.log_softmax(logits.astype(jnp.float32))
    confidences, topk = lax.top_k(chances, min(TOP_K, logits.shape[1]))
    losses = -jnp.take_along_axis(chances, labels[:, None], axis=1)[:, 0]
    return topk, jnp.exp(confidences), losses


def local_rows(array: Array) -> Values:
    """The rows of this process, in the order of the mesh; those of devices that hold the same ones, once."""
    parts = {shard.index[0].start or 0: shard.data for shard in array.addressable_shards}
    return np.concatenate([np.asarray(parts[start]) for start in sorted(parts)])


def _stop_flags(mesh: Mesh, held: int, value: int) -> Array:
    sharding = NamedSharding(mesh, PartitionSpec(RANKS))
    return assemble_array(np.full(held, value, np.int32), sharding, dim=0, length=axis_size(mesh, RANKS))
