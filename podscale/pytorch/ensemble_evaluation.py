"""Evaluation of several models over one validation split: averaged logits, and a model of their mean weights.

One model is on the device at a time. Every pass reads the images again, so its images/s are those of a single model;
an ensemble of n costs the sum. Probabilities and logits are both averaged, and the report shows both, because the rule
by which Codreanu 2017 combines models could not be verified.

The model of the mean weights (Izmailov 2018, "SWA") is a comparison to averaged logits. The members' batch norm
statistics do not fit the mean weights, so they are estimated again by forward passes over training images (Izmailov
2018, section 3.2), as plain means over batches and ranks.
"""

import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from safetensors.numpy import save
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F

from podscale.config import RunConfig
from podscale.data.loaders.base import Batch
from podscale.data.shard_set import ShardSet
from podscale.distributed.waits import BATCH_NORM, EVALUATION, waiting_for
from podscale.distributed.worker_env import WorkerEnv
from podscale.pytorch.batch_norm import BatchNorm
from podscale.pytorch.device_prefetcher import DevicePrefetcher, Normalise
from podscale.pytorch.evaluator import Evaluator, PredictionColumns, batch_predictions, prediction_columns
from podscale.pytorch.models.state import model_arrays, running_statistics
from podscale.pytorch.precision import build_precision, set_numerics
from podscale.pytorch.train_state import as_array, load_arrays, load_weights_file
from podscale.pytorch.trainer import build_model_on_device
from podscale.pytorch.world import World
from podscale.runs import RunDirectory
from podscale.runs.ensemble_members import MODEL_JSON
from podscale.runs.model_files import WEIGHTS_FILE, EvaluatedModel, EvaluatedModels, read_evaluated_models, read_weights
from podscale.runs.predictions import EvaluationPass, Predictions, write_passes
from podscale.training.startup_checks import validate_world
from podscale.training.step_timer import untimed
from podscale.training.worker_stages import open_training_loader, run_evaluation_stage
from podscale.util.files import write_atomically, write_json


@dataclass
class _BatchSums:
    """Sums of one batch over the members so far: fp32 [n, classes] in host memory, and the columns of its rows."""

    rows: Batch
    logits: Tensor
    log_probabilities: Tensor
    """Logarithm of the sum of the probabilities, which does not underflow."""


class LogitAverage:
    """Average of the members' logits and probabilities. Every member must add the same batches in the same order.

    Holds two fp32 values for each sample of this rank and class: 0.4 GB for all of ImageNet's validation split.
    """

    def __init__(self) -> None:
        self._batches: list[_BatchSums] = []
        self._members = self._position = 0

    def start_member(self) -> None:
        self._members += 1
        self._position = 0

    def add(self, batch: Batch, logits: Tensor) -> None:
        """Add the next batch of this member, with its `logits` [n, classes]."""
        logits = logits.float().cpu()
        log_probabilities = F.log_softmax(logits, dim=1)
        if self._members == 1:
            rows = Batch(None, batch.labels, batch.keys, batch.weights, batch.step)
            self._batches.append(_BatchSums(rows, logits, log_probabilities))
        else:
            sums = self._batches[self._position]
            assert (sums.rows.keys == batch.keys).all(), "another order of samples"
            sums.logits += logits
            sums.log_probabilities = torch.logaddexp(sums.log_probabilities, log_probabilities)
        self._position += 1

    def columns(self, averaged: Literal["probabilities", "logits"]) -> list[PredictionColumns]:
        return [
            prediction_columns(s.rows, batch_predictions(self._mean(s, averaged), torch.from_numpy(s.rows.labels)))
            for s in self._batches
        ]

    def _mean(self, sums: _BatchSums, averaged: Literal["probabilities", "logits"]) -> Tensor:
        """Return mean logits, or the logarithm of mean probabilities, whose softmax they are."""
        if averaged == "logits":
            return sums.logits / self._members
        return sums.log_probabilities - math.log(self._members)


def mean_weights(model: nn.Module, files: Sequence[Path]) -> dict[str, npt.NDArray[Any]]:
    """Return the mean of exported weights and statistics by name, fp32, summed in fp64. Raises as `read_weights`."""
    shapes = {name: tuple(tensor.shape) for name, tensor in model_arrays(model).items()}
    sums: dict[str, npt.NDArray[Any]] = {name: np.zeros(shape) for name, shape in shapes.items()}
    for file in files:
        for name, array in read_weights(file, shapes).items():
            sums[name] += array
    return {name: (total / len(files)).astype(np.float32) for name, total in sums.items()}


@torch.no_grad()
def update_batch_norm(
    model: nn.Module, config: RunConfig, world: World, shard_set: ShardSet, evaluator: Evaluator
) -> None:
    """Replace batch norm's running statistics by their means over `evaluate.statistics_images` training images.

    Images are augmented as in the last part of the training, which is the collapse if there is one.
    """
    layers = [module for module in model.modules() if isinstance(module, BatchNorm)]
    if not layers:
        return
    crop = config.ensemble.collapse.crop if config.ensemble.cycles else config.input.crop
    input_section = config.input.model_copy(update={"crop": crop})
    train = config.train.model_copy(update={"phases": ()})
    config = config.model_copy(update={"input": input_section, "train": train})
    split = shard_set.split("train")
    steps = max(1, min(config.evaluate.statistics_images, len(split)) // config.train.global_batch)
    loader = open_training_loader(config, split, ranks=world.ranks, world_size=world.size, device=str(world.device))
    normalise = Normalise(config.input, world, channels_last=config.train.channels_last)
    model.eval()  # without dropout
    momenta = [layer.momentum for layer in layers]
    try:
        for layer in layers:
            layer.train()
        for number, batch in enumerate(evaluator.prefetcher(loader.batches(0, steps), untimed), start=1):
            for layer in layers:
                layer.momentum = 1.0 / number  # the first batch replaces the old statistics
            with evaluator.precision.autocast():
                model(normalise(batch.images))
    finally:
        loader.close()
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum
        model.train()
    for layer in layers:
        for statistics in (layer.running_mean, layer.running_var):
            with waiting_for(BATCH_NORM):
                dist.all_reduce(statistics)
            statistics /= world.size


def evaluate_ensemble(worker_env: WorkerEnv, world: World, shard_set: ShardSet, run: RunDirectory) -> None:
    """Evaluate a document's models as an ensemble. Raises InputError on every rank if they cannot be combined."""
    config = worker_env.config
    set_numerics(config.train)
    evaluated = read_evaluated_models(config, shard_set.classes)
    if evaluated.same_architecture:
        validate_world(config, world.size, len(shard_set.split("train")))
    precision, prefetcher = build_precision(config.train, world), DevicePrefetcher(world)
    run_evaluation_stage(
        worker_env,
        world,
        run,
        lambda count_images: Evaluator(config, world, shard_set, precision, prefetcher, count_images),
        lambda evaluator: _EnsembleEvaluation(config, world, shard_set, evaluated, run.ensemble, evaluator).run(),
    )


@dataclass
class _EnsembleEvaluation:
    """All passes of an evaluation, one after the other; every rank takes part in each."""

    config: RunConfig
    world: World
    shard_set: ShardSet
    models: EvaluatedModels
    directory: Path
    evaluator: Evaluator
    passes: list[EvaluationPass] = field(default_factory=list)
    predictions: dict[str, Predictions] = field(default_factory=dict)

    def run(self) -> Predictions | None:
        """Run and write all passes. Returns the predictions of `evaluate.combine` on rank 0, None on other ranks."""
        logit_average = LogitAverage()
        for number, member in enumerate(self.models.members):
            logit_average.start_member()
            self._evaluate_model(f"member-{number}", member, member.weights, logit_average)
        for number, member in enumerate(self.models.members):
            if member.average_weights is not None:
                self._evaluate_model(f"average-{number}", member, member.average_weights)
        if self.models.same_architecture:
            self._evaluate_mean_weights()
        if self.models.baseline is not None:
            self._evaluate_model("baseline", self.models.baseline, self.models.baseline.weights)
        self._store_columns("probabilities", logit_average.columns("probabilities"))
        self._store_columns("logits", logit_average.columns("logits"))
        if not self.world.is_rank0:
            return None
        write_passes(self.directory, self.passes, self.predictions)
        return self.predictions[self.config.evaluate.combine]

    def _evaluate_model(
        self, name: str, evaluated: EvaluatedModel, weights: Path, logit_average: LogitAverage | None = None
    ) -> None:
        model = self._build_model(evaluated)
        load_weights_file(model, weights)
        self._predict(name, evaluated.directory, model, logit_average)

    def _evaluate_mean_weights(self) -> None:
        members = self.models.members
        model = self._build_model(members[0])
        arrays = mean_weights(model, [member.weights for member in members])
        load_arrays(model, arrays)
        with self._measure_seconds() as seconds:
            update_batch_norm(model, self.config, self.world, self.shard_set, self.evaluator)
        directory = self.directory / "mean"
        if self.world.is_rank0:
            arrays |= {name: as_array(buffer) for name, buffer in running_statistics(model).items()}
            _write_mean_model(arrays, members, directory)
        self._predict("weights", directory, model, statistics_seconds=seconds[0])

    @waiting_for(EVALUATION)
    def _predict(
        self,
        name: str,
        directory: Path,
        model: nn.Module,
        logit_average: LogitAverage | None = None,
        statistics_seconds: float = 0.0,
    ) -> None:
        parts = []
        with self._measure_seconds() as seconds:
            for batch, logits in self.evaluator.logits(model, untimed):
                parts.append(prediction_columns(batch.host_batch, batch_predictions(logits, batch.labels)))
                if logit_average is not None:
                    logit_average.add(batch.host_batch, logits)
        self.passes.append(EvaluationPass(name, str(directory), seconds[0], statistics_seconds))
        self._store_columns(name, parts)

    def _store_columns(self, name: str, parts: list[PredictionColumns]) -> None:
        predictions = self.evaluator.gather(parts)
        if predictions is not None:
            self.predictions[name] = predictions

    def _build_model(self, evaluated: EvaluatedModel) -> nn.Module:
        config = self.config.model_copy(update={"model": evaluated.model_section})
        model = build_model_on_device(config, self.world, len(self.shard_set.classes))
        self.evaluator.precision.cast_parameters(model)
        return model

    @contextmanager
    def _measure_seconds(self) -> Iterator[list[float]]:
        """Yield a list that holds the seconds of the block at its end, when all ranks and their devices are done."""
        self._synchronize()
        started, seconds = time.perf_counter(), list[float]()
        yield seconds
        self._synchronize()
        seconds.append(round(time.perf_counter() - started, 6))

    def _synchronize(self) -> None:
        if self.world.on_gpu:
            torch.cuda.synchronize(self.world.device)
        self.world.barrier()


def _write_mean_model(arrays: dict[str, npt.NDArray[Any]], members: list[EvaluatedModel], directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    description = json.loads((members[0].directory / MODEL_JSON).read_text(encoding="utf-8"))
    description["training"] = {"mean_of": [str(member.directory) for member in members]}
    write_atomically(directory / WEIGHTS_FILE, save(arrays, metadata={"format": "pt"}))
    write_json(directory / MODEL_JSON, description)
