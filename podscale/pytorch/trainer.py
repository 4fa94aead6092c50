"""`PyTorchTrainer`: one rank of a PyTorch training run, and the functions that build it from the run document."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy.typing as npt
import torch
from torch import Tensor

from podscale import models
from podscale.config import RunConfig, TrainSection
from podscale.config.batch_norm_groups import batch_norm_group
from podscale.config.train import AllReduceSection
from podscale.data.loaders.base import Loader
from podscale.data.loaders.build_loader import build_evaluation_loader, build_loader
from podscale.data.sampler import build_sampler
from podscale.data.shard_set import ShardSet
from podscale.distributed.step_status import StepStatus, StopRequest
from podscale.errors import InputError
from podscale.pytorch.all_reduce.auto import relative_error
from podscale.pytorch.batch_norm import assign_batch_norm_groups
from podscale.pytorch.batch_norm.layer import RunningStatistics, running_statistics_weight
from podscale.pytorch.cuda_graph import CudaGraphStep
from podscale.pytorch.device_prefetcher import BatchMixer, DevicePrefetcher, Normalise
from podscale.pytorch.evaluator import Evaluator
from podscale.pytorch.flat_buffers import GATHER_DTYPES, FlatWeights
from podscale.pytorch.models import build_model, set_stem_compute
from podscale.pytorch.optim import LookaheadOptimizer, Optimizer, build_optimizer, build_param_shard
from podscale.pytorch.optim.base import build_replica_group
from podscale.pytorch.precision import Precision, build_precision, set_numerics
from podscale.pytorch.reducer import BucketedReducer, GradientReducer, build_reducer
from podscale.pytorch.step_sync import StepSync
from podscale.pytorch.train_state import TrainState, build_ema, restore_or_start
from podscale.pytorch.train_step import DropoutRng, TrainStep, build_forward, build_loss, release_cuda_graphs
from podscale.pytorch.world import World
from podscale.runs.checkpoint import CheckpointStore, Snapshot
from podscale.training import schedules
from podscale.training.model_weights import load_initial_weights
from podscale.training.run_progress import EvaluationResult, RunProgress
from podscale.training.startup_checks import validate_world
from podscale.training.trainer import Trainer
from podscale.training.training_logger import TrainingLogger

MEMORY_STATS = {
    "device_allocated": "allocated_bytes.all.current",
    "device_reserved": "reserved_bytes.all.current",
    "device_peak": "allocated_bytes.all.peak",
}
"""Keys of `torch.cuda.memory_stats` by the kinds that Podscale reports."""


@dataclass(kw_only=True)
class PyTorchTrainer(Trainer):
    """Trainer on PyTorch. `step` runs a train step; `state` holds what a checkpoint saves."""

    world: World
    state: TrainState
    evaluator: Evaluator
    step_sync: StepSync
    step: TrainStep | CudaGraphStep
    reducer: GradientReducer
    prefetcher: DevicePrefetcher

    def restore(self) -> bool:
        resumed = restore_or_start(
            self.checkpoint_store, self.config.checkpoint.resume, self.state, self.world, self.initial_weights
        )
        self.step.seek(self.progress.step)
        return resumed

    def train_steps(self) -> Iterator[list[StepStatus]]:
        logger, progress, ema = self.training_logger, self.progress, self.state.ema
        batches = self.loader.batches(progress.step, self.end_step)
        for batch in self.prefetcher(batches, logger.phase):
            self.log_image_size(batch.images.shape[1])
            result = self.step(batch, logger.phase)
            progress.step += 1
            if ema is not None:
                with logger.phase("optimizer"):
                    ema.update(progress.step)
            self.step_sync.send(
                progress.step, result, busy_seconds=logger.busy_seconds, stop=self.stop_request.requested
            )
            logger.step_done(progress.step, len(batch.labels), self.loader.bad_records)
            yield self.step_sync.ready()

    def evaluate_weights(self, *, averaged: bool) -> EvaluationResult | None:
        with self.state.with_weights(averaged=averaged) as model:
            return self.evaluator.evaluate(model, self.training_logger.subphase, lambda: self.stop_request.requested)

    def capture_state(self) -> Snapshot | None:
        return self.state.capture(self.world)

    def model_arrays(self, *, averaged: bool) -> dict[str, npt.NDArray[Any]]:
        return self.state.model_arrays(averaged=averaged)

    def barrier(self) -> None:
        self.world.barrier()

    def device_memory(self) -> dict[str, int]:
        if not self.world.on_gpu:
            return {}
        with suppress(RuntimeError):
            stats = torch.cuda.memory_stats(self.world.device)
            return {kind: stats[name] for kind, name in MEMORY_STATS.items() if name in stats}
        return {}

    def close(self) -> None:
        if isinstance(self.step, CudaGraphStep):
            self.step.close()
        release_cuda_graphs(self.config.train.compile)
        self.loader.close()
        self.evaluation_loader.close()
        self.reducer.close()
        self.checkpoint_store.close()


def build_trainer(
    config: RunConfig,
    world: World,
    shard_set: ShardSet,
    model_directory: Path,
    checkpoint_store: CheckpointStore,
    training_logger: TrainingLogger,
    stop_request: StopRequest,
) -> PyTorchTrainer:
    """Build the trainer of a run document. Every rank must call this at the same time."""
    train, training_split = config.train, shard_set.split("train")
    check_world(config, world, len(training_split))
    set_numerics(train)
    spec = models.model_spec(config.model, len(shard_set.classes))
    model = build_model_on_device(config, world, len(shard_set.classes))
    parts = build_train_step(config, world, model, spec, len(training_split))
    log_wire_error(train.all_reduce, parts.reducer, world, training_logger)
    prefetcher, precision = DevicePrefetcher(world), parts.precision
    evaluation_loader, evaluator = build_evaluator(
        config, world, shard_set, prefetcher, precision, training_logger.count_evaluated_images
    )
    return PyTorchTrainer(
        config=config,
        world=world,
        classes=shard_set.classes,
        spec=spec,
        model_directory=model_directory,
        state=TrainState(
            model,
            parts.weights,
            parts.optimizer,
            precision,
            RunProgress(),
            build_ema(train.ema, model, partial(evaluation_weights, parts.optimizer, parts.weights)),
        ),
        step=CudaGraphStep(parts.step, world, on_sampled=training_logger.phases_sampled)
        if train.cuda_graph
        else parts.step,
        reducer=parts.reducer,
        prefetcher=prefetcher,
        loader=build_loader(
            config,
            training_split,
            build_sampler(config, training_split),
            phases=schedules.image_phases(config, len(training_split)),
            ranks=world.ranks,
            world_size=world.size,
            device=str(world.device),
        ),
        evaluation_loader=evaluation_loader,
        evaluator=evaluator,
        step_sync=StepSync(world),
        training_logger=training_logger,
        checkpoint_store=checkpoint_store,
        stop_request=stop_request,
        initial_weights=partial(load_initial_weights, config, shard_set),
        training_images=len(training_split),
    )


class StepParts(NamedTuple):
    """A train step and its parts."""

    step: TrainStep
    reducer: GradientReducer
    weights: FlatWeights
    optimizer: Optimizer
    precision: Precision


def build_train_step(
    config: RunConfig,
    world: World,
    model: torch.nn.Module,
    spec: models.ModelSpec,
    samples: int,
) -> StepParts:
    """Build the train step of a run document.

    Args:
        model: network on the device; its weights become the initial weights.
        samples: training images.
    """
    train = config.train
    assign_batch_norm_groups(model, world, batch_norm_group(config, world.size))
    statistics = RunningStatistics(model, weight=running_statistics_weight(config.model.batch_norm, world))
    precision = build_precision(train, world)
    per_epoch = schedules.steps_per_epoch(train, samples)
    extra = 1 + len(statistics)
    reducer, weights, optimizer = build_reducer_and_optimizer(
        train, model, spec, precision, world, per_epoch, extra=extra
    )
    normalise = Normalise(config.input, world, channels_last=train.channels_last)
    mixing = BatchMixer(train.mix, config.run.seed, world) if train.mix.is_enabled else None
    prepare = normalise if mixing is None else lambda images: mixing.mix_images(normalise(images))
    step = TrainStep(
        reducer,
        optimizer,
        weights,
        precision,
        statistics,
        schedule=torch.from_numpy(schedules.step_table(train, samples)).to(world.device),
        loss=build_loss(config),
        accumulation=train.accumulation,
        forward=build_forward(prepare, reducer.module, train.compile, ranks=world.size),
        mixing=mixing,
        dropout_rng=DropoutRng(model, config.run.seed, world),
        # No rank has the whole gradient if the weight update is sharded.
        norm_every=config.telemetry.log_every if train.weight_update == "replicated" else 0,
    )
    return StepParts(step, reducer, weights, optimizer, precision)


def evaluation_weights(optimizer: Optimizer, weights: FlatWeights) -> list[Tensor]:
    """Return this rank's fp32 weights to evaluate, in the order of `FlatWeights.local_masters`."""
    return [optimizer.evaluation_weights()] if isinstance(optimizer, LookaheadOptimizer) else weights.local_masters()


def log_wire_error(
    section: AllReduceSection, reducer: GradientReducer, world: World, training_logger: TrainingLogger
) -> None:
    """Measure and log the error of an all-reduce in bf16 or fp16, if the document asks for such a wire format."""
    wires = {"wire_row": section.wire_row, "wire_column": section.wire_column}
    if set(wires.values()) != {"fp32"} and isinstance(reducer, BucketedReducer):
        error = relative_error(reducer.all_reduce, world, int(section.bucket_mb * 2**18))
        training_logger.log_event(
            "all_reduce_error", relative=error, algorithm=section.algorithm, ranks=world.size, **wires
        )


def build_reducer_and_optimizer(
    train: TrainSection,
    model: torch.nn.Module,
    spec: models.ModelSpec,
    precision: Precision,
    world: World,
    steps_per_epoch: float,
    *,
    extra: int,
) -> tuple[GradientReducer, FlatWeights, Optimizer]:
    """Build reducer, flat weights and optimizer over one flat layout.

    Args:
        steps_per_epoch: steps of one pass over the training split.
        extra: values per rank that are averaged along with the gradients.
    """
    reducer = build_reducer(train.all_reduce, model, world, extra=extra, sharded=train.weight_update == "sharded")
    weights = FlatWeights(
        reducer.buffer,
        reducer.sharded_all_reduce,
        dtype=GATHER_DTYPES[train.weight_gather],
        cast=lambda: precision.cast_parameters(model),
    )
    shard = build_param_shard(train.optimizer, reducer.buffer, weights.masters, spec, reducer.sharded_all_reduce)
    return reducer, weights, build_optimizer(train.optimizer, shard, steps_per_epoch, build_replica_group(world))


def build_model_on_device(config: RunConfig, world: World, classes: int) -> torch.nn.Module:
    """Build the network with the run's initial weights, on the device, in the document's memory format."""
    torch.manual_seed(config.run.seed)
    layout = torch.channels_last if config.train.channels_last else torch.contiguous_format
    model = build_model(config.model, classes).to(world.device, memory_format=layout)  # type: ignore[call-overload]
    set_stem_compute(model, config.train.stem_compute)
    assert isinstance(model, torch.nn.Module)
    return model.train()


def build_evaluator(
    config: RunConfig,
    world: World,
    shard_set: ShardSet,
    prefetcher: DevicePrefetcher,
    precision: Precision,
    count_images: Callable[[int], None] = lambda images: None,
) -> tuple[Loader, Evaluator]:
    """Build the evaluator of the validation split and its loader. The caller closes the loader."""
    split = shard_set.split("validation")
    loader = build_evaluation_loader(config, split, ranks=world.ranks, world_size=world.size, device=str(world.device))
    normalise = Normalise(config.input, world, channels_last=config.train.channels_last)
    evaluator = Evaluator(
        loader,
        len(split),
        config.evaluate.batch,
        prefetcher,
        normalise,
        precision,
        world,
        count_images,
        flip=config.evaluate.flip,
    )
    return loader, evaluator


def check_world(config: RunConfig, world: World, samples: int) -> None:
    """Raise InputError if the run does not fit this many ranks or training images (`samples`)."""
    validate_world(config, world.size, samples)
    if config.train.cuda_graph and not world.on_gpu:
        raise InputError(
            "torch sees no CUDA device here", field="train.cuda_graph", got=True, hint="Set train.cuda_graph=false"
        )
