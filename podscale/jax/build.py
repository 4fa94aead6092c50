"""What puts together the parts of a training that the run document chooses."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from jax.sharding import Mesh

from podscale import models
from podscale.config import RunConfig
from podscale.data.loaders.base import Loader
from podscale.data.loaders.build_loader import build_evaluation_loader, build_loader
from podscale.data.sampler import build_sampler
from podscale.data.shard_set import ShardSet, Split
from podscale.distributed.step_status import StopRequest
from podscale.jax.checkpoints import TrainState
from podscale.jax.compilation import synchronize_first_call
from podscale.jax.control import StepSync
from podscale.jax.evaluate import Evaluator
from podscale.jax.feed import DevicePrefetcher
from podscale.jax.gradients import ParamLayout
from podscale.jax.mesh import RANKS, axis_size, mesh_for_config
from podscale.jax.placing import put_replicated
from podscale.jax.session import JaxTrainer
from podscale.jax.step import build_train_step
from podscale.jax.world import World
from podscale.runs.checkpoint import CheckpointStore
from podscale.training import schedules
from podscale.training.model_weights import load_initial_weights
from podscale.training.startup_checks import validate_world
from podscale.training.training_logger import TrainingLogger

HOST = "cpu"
"""Where loaders decode: batches reach the devices as pixels."""


def build_trainer(
    config: RunConfig,
    world: World,
    shard_set: ShardSet,
    model_directory: Path,
    checkpoint_store: CheckpointStore,
    training_logger: TrainingLogger,
    stop_request: StopRequest,
) -> JaxTrainer:
    """Builds everything that the document asks for. Every process must call this at the same time."""
    train, training_split, classes = config.train, shard_set.split("train"), len(shard_set.classes)
    validate_world(config, len(world.devices), len(training_split))
    mesh = mesh_for_config(config, world.devices)
    step = build_train_step(config, mesh, classes)
    step = replace(step, run_steps=synchronize_first_call(step.run_steps, world, "the first update"))
    feed = DevicePrefetcher(mesh, train.steps_per_call)
    evaluation_loader, evaluator = build_evaluator(
        config, world, mesh, step.layout, shard_set, training_logger.count_evaluated_images
    )
    return JaxTrainer(
        config=config,
        world=world,
        classes=shard_set.classes,
        spec=models.model_spec(config.model, classes),
        model_directory=model_directory,
        state=TrainState(config, classes, step, world),
        step=step,
        schedule=put_replicated(schedules.step_table(train, len(training_split)), mesh),
        prefetcher=feed,
        loader=build_training_loader(config, world, mesh, training_split),
        evaluation_loader=evaluation_loader,
        evaluator=evaluator,
        step_sync=StepSync(mesh, world.rank, feed.local_ranks),
        training_logger=training_logger,
        checkpoint_store=checkpoint_store,
        stop_request=stop_request,
        initial_weights=partial(load_initial_weights, config, shard_set),
        training_images=len(training_split),
    )


def build_evaluator(
    config: RunConfig,
    world: World,
    mesh: Mesh,
    layout: ParamLayout,
    shard_set: ShardSet,
    count_images: Callable[[int], None] = lambda images: None,
) -> tuple[Loader, Evaluator]:
    """The evaluator over the validation split, and its loader, which the caller closes."""
    split = shard_set.split("validation")
    loader = build_evaluation_loader(
        config, split, ranks=loader_ranks(world, mesh), world_size=axis_size(mesh, RANKS), device=HOST
    )
    return loader, Evaluator(config, mesh, layout, loader, len(split), world, count_images)


def build_training_loader(config: RunConfig, world: World, mesh: Mesh, split: Split) -> Loader:
    """The loader of this process's share of the training batches, which the caller closes."""
    order = build_sampler(config, split)
    return build_loader(
        config,
        split,
        order,
        phases=schedules.image_phases(config, len(split)),
        ranks=loader_ranks(world, mesh),
        world_size=axis_size(mesh, RANKS),
        device=HOST,
    )


def loader_ranks(world: World, mesh: Mesh) -> range:
    """The ranks of the sample order that this process reads for: its devices, or its groups that share images."""
    held = axis_size(mesh, RANKS) // world.size
    return range(world.rank * held, (world.rank + 1) * held)
