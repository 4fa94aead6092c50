"""`PyTorchTrainer`: one rank of a PyTorch training run, and the functions that build it from the run document."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from podscale import models
from podscale.config import RunConfig, TrainSection
from podscale.config.batch_phases import BatchPhase, batch_phases
from podscale.config.ranks import batch_norm_group
from podscale.config.train import AllReduceSection
from podscale.data.shard_set import ShardSet
from podscale.data.step_positions import step_positions
from podscale.distributed.step_status import StepStatus, StopRequest
from podscale.errors import InputError
from podscale.pytorch.all_reduce.auto import relative_error
from podscale.pytorch.batch_norm import assign_batch_norm_groups
from podscale.pytorch.batch_norm.fuse_layers import fuse_batch_norm, gemm_load_facts
from podscale.pytorch.batch_norm.layer import (
    BatchNormMomenta,
    RunningStatistics,
    running_statistics_weight,
)
from podscale.pytorch.cuda_graph import CudaGraphStep
from podscale.pytorch.device_prefetcher import BatchMixer, DeviceBatch, DevicePrefetcher, Normalise
from podscale.pytorch.evaluator import Evaluator
from podscale.pytorch.fine_tuning import build_rate_scales, freeze_parameters
from podscale.pytorch.flat_buffers import GATHER_DTYPES, FlatWeights
from podscale.pytorch.models import build_model, set_stem_compute
from podscale.pytorch.optim import LookaheadOptimizer, Optimizer, StepAware, build_optimizer, build_param_shard
from podscale.pytorch.optim.base import build_replica_group
from podscale.pytorch.precision import Precision, build_precision, set_numerics
from podscale.pytorch.reducer import BucketedReducer, GradientReducer, build_reducer
from podscale.pytorch.step_sync import StepSync
from podscale.pytorch.train_state import TrainState, build_ema, restore_or_start
from podscale.pytorch.train_step import (
    DropoutRng,
    ForwardBackward,
    TrainingLoss,
    TrainStep,
    allow_compilations,
    build_forward,
)
from podscale.pytorch.weight_sources import read_source
from podscale.pytorch.world import World
from podscale.runs.checkpoint import CheckpointStore, Snapshot
from podscale.training import schedules
from podscale.training.initial_weights import load_initial_weights
from podscale.training.run_progress import EvaluationResult, RunProgress
from podscale.training.startup_checks import validate_world
from podscale.training.trainer import Trainer
from podscale.training.training_logger import TrainingLogger
from podscale.training.worker_stages import open_training_loader

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

    @cached_property
    def _training_flops(self) -> Callable[[int], int]:
        return cache(self.spec.training_flops)

    def restore(self) -> bool:
        initial_weights = partial(load_initial_weights, self.config, self.shard_set, read_source)
        resumed = restore_or_start(
            self.checkpoint_store, self.config.checkpoint.resume, self.state, self.world, initial_weights
        )
        self.step.seek(self.progress.step)
        return resumed

    def batches_of_phase(self, stop: int) -> Iterator[DeviceBatch]:
        return self.prefetcher(self.loader.batches(self.progress.step, stop), self.training_logger.timer.phase)

    def set_batch_phase(self, phase: BatchPhase) -> None:
        norm_group = batch_norm_group(phase.apply(self.config), self.world.size)
        assign_batch_norm_groups(self.state.model, self.world, norm_group)
        self.step.set_accumulation(phase.accumulation)

    def train_step(self, batch: DeviceBatch) -> list[StepStatus]:
        logger, timer, progress = self.training_logger, self.training_logger.timer, self.progress
        logger.metrics.set_flops_per_image(self._training_flops(batch.images.shape[1]))
        result = self.step(batch, timer.phase)
        progress.step += 1
        if self.state.ema is not None:
            with timer.phase("optimizer"):
                self.state.ema.update(progress.step)
        self.step_sync.send(progress.step, result, busy_seconds=timer.busy_seconds, stop=self.stop_request.requested)
        logger.step_done(progress.step, len(batch.labels), self.loader.bad_records)
        return self.step_sync.ready()

    def evaluate_weights(self, *, averaged: bool) -> EvaluationResult | None:
        subphase = self.training_logger.timer.subphase
        with self.state.with_weights(averaged=averaged) as model:
            return self.evaluator.evaluate(model, subphase, lambda: self.stop_request.requested)

    def capture_state(self) -> Snapshot | None:
        return self.state.capture(self.world)

    def model_arrays(self, *, averaged: bool) -> dict[str, npt.NDArray[Any]]:
        return self.state.model_arrays(averaged=averaged)

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
        if self.config.train.compile in ("reduce-overhead", "max-autotune") and self.world.on_gpu:
            torch.compiler.reset()  # frees the compiler's own CUDA graphs, which NCCL would wait for
        self.reducer.close()
        super().close()


def build_trainer(
    config: RunConfig,
    world: World,
    shard_set: ShardSet,
    checkpoint_store: CheckpointStore,
    training_logger: TrainingLogger,
    stop_request: StopRequest,
) -> PyTorchTrainer:
    """Build the trainer of a run document, on all ranks together. Raises InputError if the run does not fit."""
    train, split = config.train, shard_set.split("train")
    validate_world(config, world.size, len(split))
    assert train.fused_kernels != "auto", "replaced by the choice of `kernel_choice`"
    if train.cuda_graph and not world.on_gpu:
        raise InputError(
            "torch sees no CUDA device here", field="train.cuda_graph", got=True, hint="Set train.cuda_graph=false"
        )
    set_numerics(train)
    classes = len(shard_set.classes)
    model = build_model_on_device(config, world, classes)
    freeze_parameters(config, model, classes)
    if loads := gemm_load_facts(model):
        training_logger.gemm_loads_chosen(loads)
    step = build_train_step(config, world, model, models.model_spec(config.model, classes), len(split))
    reducer, weights, optimizer, precision = step.reducer, step.weights, step.optimizer, step.precision
    log_wire_error(train.all_reduce, reducer, world, training_logger)
    prefetcher, count_images = DevicePrefetcher(world), training_logger.metrics.count_evaluated_images
    ema = build_ema(train.ema, model, partial(evaluation_weights, optimizer, weights))
    return PyTorchTrainer(
        config=config,
        shard_set=shard_set,
        world=world,
        state=TrainState(model, weights, optimizer, precision, RunProgress(), ema),
        step=CudaGraphStep(step, world, on_sampled=training_logger.phases_sampled) if train.cuda_graph else step,
        reducer=reducer,
        prefetcher=prefetcher,
        evaluator=Evaluator(config, world, shard_set, precision, prefetcher, count_images),
        loader=open_training_loader(config, split, ranks=world.ranks, world_size=world.size, device=str(world.device)),
        step_sync=StepSync(world),
        stop_request=stop_request,
        training_logger=training_logger,
        checkpoint_store=checkpoint_store,
    )


def build_train_step(
    config: RunConfig, world: World, model: torch.nn.Module, spec: models.ModelSpec, samples: int
) -> TrainStep:
    """Build the train step; the weights of `model`, on the device, become the initial weights.

    Args:
        samples: images of the training split.
    """
    train = config.train
    assign_batch_norm_groups(model, world, batch_norm_group(config, world.size))
    statistics = RunningStatistics(model, weight=running_statistics_weight(config.model.batch_norm, world))
    precision = build_precision(train, world)
    positions = step_positions(train, samples)
    reducer, weights, optimizer = build_reducer_and_optimizer(
        train, model, spec, precision, world, positions.epoch_length, extra=1 + len(statistics)
    )
    normalise = Normalise(config.input, world, channels_last=train.channels_last)
    mixing = BatchMixer(train.mix, config.run.seed, world) if train.mix.is_enabled else None
    prepare = normalise if mixing is None else lambda images: mixing.mix_images(normalise(images))
    is_binary = train.loss == "binary_cross_entropy"
    if train.compile != "off":
        allow_compilations(len(batch_phases(train)) * len(set(config.training_sizes)))
    loss = TrainingLoss(train.label_smoothing, config.model.inception.auxiliary, is_binary, train.binary_threshold)
    forward_backward = ForwardBackward(
        reducer,
        precision,
        statistics,
        loss,
        accumulation=train.accumulation,
        forward=build_forward(prepare, reducer.module, train.compile, ranks=world.size),
        mixing=mixing,
    )
    step_aware: list[StepAware] = [DropoutRng(model, config.run.seed, world, is_external=config.model.is_external)]
    momenta = schedules.batch_norm_momenta(config, positions)
    if len(momenta) > 1:
        step_aware.append(BatchNormMomenta(model, momenta))
    return TrainStep(
        forward_backward,
        optimizer,
        weights,
        schedules.step_table(train, samples),
        rate_scales=build_rate_scales(config, reducer.buffer, weights, spec.classes),
        step_aware=step_aware,
        # No rank has the whole gradient if the weight update is sharded.
        norm_every=config.telemetry.log_every if train.weight_update == "replicated" else 0,
    )


def evaluation_weights(optimizer: Optimizer, weights: FlatWeights) -> list[Tensor]:
    """Return this rank's fp32 weights to evaluate, in the order of `FlatWeights.local_masters`."""
    return [optimizer.evaluation_weights()] if isinstance(optimizer, LookaheadOptimizer) else weights.local_masters()


def log_wire_error(
    section: AllReduceSection, reducer: GradientReducer, world: World, training_logger: TrainingLogger
) -> None:
    """Measure and log the error of an all-reduce in bf16, fp16 or int8, if the document asks for such a wire format."""
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
    """Build reducer, flat weights and optimizer over one flat layout; `extra` values per rank are averaged too."""
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
    model = build_model(config.model, classes)
    model.to(world.device, memory_format=layout)  # type: ignore[call-overload]
    set_stem_compute(model, config.train.stem_compute)
    train = config.train
    is_fused = train.fused_kernels in ("norm", "gemm")  # `auto` is replaced before a training
    if is_fused and world.on_gpu and train.channels_last and train.compile == "off":
        fuse_batch_norm(model, world.device, convolutions=train.fused_kernels == "gemm")
    return model.train()
