"""Several models over one validation split: a pass of each, their answers averaged, and a model of their mean weights.

One model is on the device at a time. Every pass reads the images anew, so that its images/s are those of a model that
is evaluated alone; an ensemble of n costs the sum.
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch
from safetensors.numpy import save
from torch import nn

from podscale.config import RunConfig
from podscale.data.loaders.base import Loader
from podscale.data.shard_set import ShardSet
from podscale.distributed.waits import EVALUATION, waiting_for
from podscale.distributed.worker_env import WorkerEnv
from podscale.pytorch.build import build_evaluator, build_model_on_device
from podscale.pytorch.checkpoints import as_array
from podscale.pytorch.evaluate import Evaluator, PredictionColumns, batch_predictions, prediction_columns
from podscale.pytorch.feed import DevicePrefetcher
from podscale.pytorch.meanweights import mean_weights, update_batch_norm
from podscale.pytorch.modelfile import load_arrays, load_weights_file
from podscale.pytorch.precision import Precision, build_precision, set_numerics
from podscale.pytorch.votes import LogitAverage
from podscale.pytorch.world import World
from podscale.runs import RunDirectory
from podscale.runs.ensemble_members import MODEL_JSON
from podscale.runs.model_files import WEIGHTS_FILE, EvaluatedModel, EvaluatedModels, read_evaluated_models
from podscale.runs.predictions import EvaluationPass, Predictions, write_passes
from podscale.training.startup_checks import validate_world
from podscale.training.training_logger import untimed
from podscale.training.worker_stages import PredictFunction, run_evaluation_stage
from podscale.util.files import write_atomically, write_json


def evaluate_ensemble(worker_env: WorkerEnv, world: World, shard_set: ShardSet, run: RunDirectory) -> None:
    """Evaluates the models of a document together; rank 0 writes what they said to the run directory.

    Raises InputError on every rank for models that do not go together.
    """
    config = worker_env.config
    set_numerics(config.train)
    together = read_evaluated_models(config, shard_set.classes)
    if together.same_architecture:
        validate_world(config, world.size, len(shard_set.split("train")))
    precision, feed = build_precision(config.train, world), DevicePrefetcher(world)

    def prepare(counted: Callable[[int], None]) -> tuple[Loader, PredictFunction]:
        loader, evaluator = build_evaluator(config, world, shard_set, feed, precision, counted)
        passes = _EnsembleEvaluation(config, world, shard_set, together, run.ensemble, evaluator, feed, precision)
        return loader, passes.run

    run_evaluation_stage(worker_env, world, run, prepare, world.barrier)


@dataclass
class _EnsembleEvaluation:
    """All passes of an evaluation, one after the other; every rank takes part in each."""

    config: RunConfig
    world: World
    shard_set: ShardSet
    models: EvaluatedModels
    directory: Path
    evaluator: Evaluator
    prefetcher: DevicePrefetcher
    precision: Precision
    passes: list[EvaluationPass] = field(default_factory=list)
    predictions: dict[str, Predictions] = field(default_factory=dict)

    def run(self) -> Predictions | None:
        """The predictions that the headline is of, on rank 0, where all others are written too."""
        votes = LogitAverage()
        for number, one in enumerate(self.models.members):
            votes.start_member()
            self._evaluate_member(f"member-{number}", one, one.weights, votes)
        for number, one in enumerate(self.models.members):
            if one.average_weights is not None:
                self._evaluate_member(f"average-{number}", one, one.average_weights)
        if self.models.same_architecture:
            self._evaluate_mean_weights()
        if self.models.baseline is not None:
            self._evaluate_member("baseline", self.models.baseline, self.models.baseline.weights)
        self._store_columns("probabilities", votes.columns("probabilities"))
        self._store_columns("logits", votes.columns("logits"))
        if not self.world.is_rank0:
            return None
        write_passes(self.directory, self.passes, self.predictions)
        return self.predictions[self.config.evaluate.combine]

    def _evaluate_member(
        self, name: str, one: EvaluatedModel, weights: Path, logit_average: LogitAverage | None = None
    ) -> None:
        model = self._build_model(one)
        load_weights_file(model, weights)
        self._predict(name, one.directory, model, logit_average)

    def _evaluate_mean_weights(self) -> None:
        members = self.models.members
        model = self._build_model(members[0])
        arrays = mean_weights(model, [one.weights for one in members])
        load_arrays(model, arrays)
        with self._measure_seconds() as seconds:
            update_batch_norm(model, self.config, self.world, self.shard_set, self.prefetcher, self.precision)
        directory = self.directory / "mean"
        if self.world.is_rank0:
            arrays |= {name: as_array(buffer) for name, buffer in model.named_buffers()}
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
        found = self.evaluator.gather(parts)
        if found is not None:
            self.predictions[name] = found

    def _build_model(self, one: EvaluatedModel) -> nn.Module:
        config = self.config.model_copy(update={"model": one.model_section})
        model = build_model_on_device(config, self.world, len(self.shard_set.classes))
        self.precision.cast_parameters(model)
        return model

    @contextmanager
    def _measure_seconds(self) -> Iterator[list[float]]:
        """The seconds until all ranks and their devices are done, once it is over."""
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
    """The model of the mean weights, as files like those of any other."""
    directory.mkdir(parents=True, exist_ok=True)
    described = json.loads((members[0].directory / MODEL_JSON).read_text(encoding="utf-8"))
    described["training"] = {"mean_of": [str(one.directory) for one in members]}
    write_atomically(directory / WEIGHTS_FILE, save(arrays, metadata={"format": "pt"}))
    write_json(directory / MODEL_JSON, described)
