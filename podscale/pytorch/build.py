"""One function for each part of a training that the run document chooses, and one that puts them together."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

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
from podscale.distributed.step_status import StopRequest
from podscale.errors import InputError
from podscale.pytorch.allreduce.selftest import relative_error
from podscale.pytorch.batchnorm import assign_batch_norm_groups
from podscale.pytorch.checkpoints import TrainState
from podscale.pytorch.compilation import build_forward
from podscale.pytorch.control import StepSync
from podscale.pytorch.ema import build_ema
from podscale.pytorch.evaluate import Evaluator
from podscale.pytorch.feed import DevicePrefetcher
from podscale.pytorch.graph import CudaGraphStep
from podscale.pytorch.loss import build_loss
from podscale.pytorch.mixing import BatchMixer
from podscale.pytorch.models import build_model, set_stem_compute
from podscale.pytorch.normalise import Normalise
from podscale.pytorch.optim import LookaheadOptimizer, Optimizer, build_optimizer, build_param_shard
from podscale.pytorch.optim.peers import build_replica_group
from podscale.pytorch.precision import Precision, build_precision, set_numerics
from podscale.pytorch.randomness import DropoutRng
from podscale.pytorch.reducer import BucketedReducer, GradientReducer, build_reducer
from podscale.pytorch.session import PyTorchTrainer
from podscale.pytorch.statistics import RunningStatistics, running_statistics_weight
from podscale.pytorch.step import TrainStep
from podscale.pytorch.weights import GATHER_DTYPES, FlatWeights
from podscale.pytorch.world import World
from podscale.runs.checkpoint import CheckpointStore
from podscale.training import schedules
from podscale.training.model_weights import load_initial_weights
from podscale.training.run_progress import RunProgress
from podscale.training.startup_checks import validate_world
from podscale.training.training_logger import TrainingLogger


def build_trainer(
    config: RunConfig,
    world: World,
    shard_set: ShardSet,
    model_directory: Path,
    checkpoint_store: CheckpointStore,
    training_logger: TrainingLogger,
    stop_request: StopRequest,
) -> PyTorchTrainer:
    """Builds everything that the document asks for. Every rank must call this at the same time."""
    train, training_split = config.train, shard_set.split("train")
    check_world(config, world, len(training_split))
    set_numerics(train)
    spec = models.model_spec(config.model, len(shard_set.classes))
    model = build_model_on_device(config, world, len(shard_set.classes))
    parts = build_train_step(config, world, model, spec, len(training_split))
    log_wire_error(train.all_reduce, parts.reducer, world, training_logger)
    feed, precision = DevicePrefetcher(world), parts.precision
    evaluation_loader, evaluator = build_evaluator(
        config, world, shard_set, feed, precision, training_logger.count_evaluated_images
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
        prefetcher=feed,
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
    """An update, and what it works with."""

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
    """The update of a document, over a model whose values it takes over. samples: training images."""
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
        norm_every=config.telemetry.log_every if train.weight_update == "replicated" else 0,  # else nobody has it all
    )
    return StepParts(step, reducer, weights, optimizer, precision)


def evaluation_weights(optimizer: Optimizer, weights: FlatWeights) -> list[Tensor]:
    """The weights that updates have reached, this rank's, fp32, in the order of `Weights.own`."""
    return [optimizer.evaluation_weights()] if isinstance(optimizer, LookaheadOptimizer) else weights.local_masters()


def log_wire_error(
    section: AllReduceSection, reducer: GradientReducer, world: World, training_logger: TrainingLogger
) -> None:
    """Measures what short messages cost in accuracy, where the document asks for them, and says so in the log."""
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
    """What averages gradients and updates the weights, over one flat layout. steps_per_epoch: updates of an epoch."""
    reducer = build_reducer(train.all_reduce, model, world, extra=extra, sharded=train.weight_update == "sharded")
    weights = FlatWeights(
        reducer.buffer,
        reducer.sharded_all_reduce,
        dtype=GATHER_DTYPES[train.weight_gather],
        cast=lambda: precision.cast_parameters(model),
    )
    share = build_param_shard(train.optimizer, reducer.buffer, weights.masters, spec, reducer.sharded_all_reduce)
    return reducer, weights, build_optimizer(train.optimizer, share, steps_per_epoch, build_replica_group(world))


def build_model_on_device(config: RunConfig, world: World, classes: int) -> torch.nn.Module:
    """The network with the run's initial weights, on the device, in its memory order."""
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
    """The evaluator over the validation split, and its loader, which the caller closes."""
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
    """Raises InputError where the run does not fit this many ranks or this many training images."""
    validate_world(config, world.size, samples)
    if config.train.cuda_graph and not world.on_gpu:
        raise InputError(
            "torch sees no CUDA device here", field="train.cuda_graph", got=True, hint="Set train.cuda_graph=false"
        )
