"""What puts together the parts of a training that the run document chooses."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from jax.sharding import Mesh

from podscale import models, schedules
from podscale.checkpoint import Checkpoints
from podscale.config import RunConfig
from podscale.engine.fit import check_fit
from podscale.engine.monitor import Monitor
from podscale.engine.origin import find_origin
from podscale.engine.stop import StopRequest
from podscale.input import Loader, build_evaluation_loader, build_loader
from podscale.jax.checkpoints import State
from podscale.jax.compilation import begun_together
from podscale.jax.control import Control
from podscale.jax.evaluate import Evaluator
from podscale.jax.feed import Feed
from podscale.jax.gradients import Layout
from podscale.jax.mesh import RANKS, mesh_of, size_of
from podscale.jax.placing import replicate
from podscale.jax.session import Session
from podscale.jax.step import build_step
from podscale.jax.world import World
from podscale.order import build_order
from podscale.shards.shardset import ShardSet, Split

HOST = "cpu"
"""Where loaders decode: batches reach the devices as pixels."""


def build_session(
    config: RunConfig,
    world: World,
    shard_set: ShardSet,
    model_directory: Path,
    checkpoints: Checkpoints,
    monitor: Monitor,
    stop: StopRequest,
) -> Session:
    """Builds everything that the document asks for. Every process must call this at the same time."""
    train, training_split, classes = config.train, shard_set.split("train"), len(shard_set.classes)
    check_fit(config, len(world.devices), len(training_split))
    mesh = mesh_of(config, world.devices)
    step = build_step(config, mesh, classes)
    step = replace(step, updates=begun_together(step.updates, world, "the first update"))
    feed = Feed(mesh, train.steps_per_call)
    evaluation_loader, evaluator = build_evaluator(
        config, world, mesh, step.layout, shard_set, monitor.evaluated_images
    )
    return Session(
        config=config,
        world=world,
        classes=shard_set.classes,
        spec=models.spec(config.model, classes),
        model_directory=model_directory,
        state=State(config, classes, step, world),
        step=step,
        schedule=replicate(schedules.table(train, len(training_split)), mesh),
        feed=feed,
        loader=build_training_loader(config, world, mesh, training_split),
        evaluation_loader=evaluation_loader,
        evaluator=evaluator,
        control=Control(mesh, world.rank, feed.held),
        monitor=monitor,
        checkpoints=checkpoints,
        stop=stop,
        origin=partial(find_origin, config, shard_set),
        training_images=len(training_split),
    )


def build_evaluator(
    config: RunConfig,
    world: World,
    mesh: Mesh,
    layout: Layout,
    shard_set: ShardSet,
    counted: Callable[[int], None] = lambda images: None,
) -> tuple[Loader, Evaluator]:
    """The evaluator over the validation split, and its loader, which the caller closes."""
    split = shard_set.split("validation")
    loader = build_evaluation_loader(
        config, split, ranks=ranks_of(world, mesh), world=size_of(mesh, RANKS), device=HOST
    )
    return loader, Evaluator(config, mesh, layout, loader, len(split), world, counted)


def build_training_loader(config: RunConfig, world: World, mesh: Mesh, split: Split) -> Loader:
    """The loader of this process's share of the training batches, which the caller closes."""
    order = build_order(config, split)
    return build_loader(
        config,
        split,
        order,
        phases=schedules.image_phases(config, len(split)),
        ranks=ranks_of(world, mesh),
        world=size_of(mesh, RANKS),
        device=HOST,
    )


def ranks_of(world: World, mesh: Mesh) -> range:
    """The ranks of the sample order that this process reads for: its devices, or its groups that share images."""
    held = size_of(mesh, RANKS) // world.size
    return range(world.rank * held, (world.rank + 1) * held)
