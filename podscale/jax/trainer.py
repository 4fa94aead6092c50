"""`JaxTrainer`: one process of a JAX training run, and the functions that build it from the run document."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy.typing as npt
from jax import Array
from jax.sharding import Mesh

from podscale import models
from podscale.config import RunConfig
from podscale.data.loaders.base import Loader
from podscale.data.loaders.build_loader import build_evaluation_loader, build_loader
from podscale.data.sampler import build_sampler
from podscale.data.shard_set import ShardSet, Split
from podscale.distributed.step_status import StepStatus, StopRequest
from podscale.jax.device_prefetcher import DevicePrefetcher
from podscale.jax.evaluator import Evaluator
from podscale.jax.flat_buffers import ParamLayout
from podscale.jax.mesh import RANKS, axis_size, mesh_for_config, put_replicated
from podscale.jax.out_of_memory import explain_training_memory
from podscale.jax.program_cache import synchronize_first_call
from podscale.jax.step_sync import StepSync
from podscale.jax.train_state import TrainState, restore_or_start
from podscale.jax.train_step import TrainStep, build_train_step
from podscale.jax.world import World
from podscale.runs.checkpoint import CheckpointStore, Snapshot
from podscale.training import schedules
from podscale.training.model_weights import load_initial_weights
from podscale.training.run_progress import EvaluationResult
from podscale.training.startup_checks import validate_world
from podscale.training.trainer import Trainer
from podscale.training.training_logger import TrainingLogger

MEMORY_STATS = {
    "device_allocated": "bytes_in_use",
    "device_reserved": "bytes_reserved",
    "device_peak": "peak_bytes_in_use",
}
"""Keys of `Device.memory_stats` by the kinds that Podscale reports."""


@dataclass(kw_only=True)
class JaxTrainer(Trainer):
    """Trainer on JAX. `step` runs train steps; `state` holds what a checkpoint saves."""

    world: World
    state: TrainState
    evaluator: Evaluator
    step_sync: StepSync
    step: TrainStep
    schedule: Array
    """Hyperparameters of every step, fp32 [steps, schedules.COLUMNS], on the devices."""
    prefetcher: DevicePrefetcher

    def restore(self) -> bool:
        return restore_or_start(self.checkpoint_store, self.config.checkpoint.resume, self.state, self.initial_weights)

    def train_steps(self) -> Iterator[list[StepStatus]]:
        logger, progress, state = self.training_logger, self.progress, self.state
        batches = self.loader.batches(progress.step, self.end_step)
        for batch in self.prefetcher(batches, logger.phase, self.next_step_count):
            count = len(batch.host_batches)
            with logger.phase("forward_backward"):
                call = self.step_sync.step_inputs(
                    count, stop=self.stop_request.requested, busy_seconds=logger.busy_seconds
                )
                with explain_training_memory(self.config, len(self.world.devices)):
                    given = state.device_state, batch.device_batches, self.schedule, call
                    state.device_state, results = self.step.run_steps(*given)
                self.step_sync.send(progress.step, count, results)
            logger.wait_started()
            with logger.phase("forward_backward"):
                statuses = self.step_sync.ready()
            progress.step += count
            logger.step_done(progress.step, batch.images // count, self.loader.bad_records, steps=count)
            yield statuses

    def next_step_count(self) -> int:
        """Return the number of steps of the next call: up to the first after which something else is due."""
        log_every, step = self.config.telemetry.log_every, self.progress.step
        longest = range(step + 1, step + self.prefetcher.length)
        return 1 + sum(1 for _ in takewhile(lambda n: n % log_every and not self.is_due_after(n), longest))

    def evaluate_weights(self, *, averaged: bool) -> EvaluationResult | None:
        statistics = self.state.device_state.statistics
        return self.evaluator.evaluate(
            self.state.unshard_weights(), statistics, self.training_logger.subphase, lambda: self.stop_request.requested
        )

    def capture_state(self) -> Snapshot | None:
        return self.state.capture()

    def model_arrays(self, *, averaged: bool) -> dict[str, npt.NDArray[Any]]:
        return self.state.model_arrays()

    def barrier(self) -> None:
        self.world.barrier("the end of a stage")

    def device_memory(self) -> dict[str, int]:
        memory: dict[str, int] = {}
        for device in self.world.local_devices:
            with suppress(Exception):  # a device without statistics must not fail the run
                stats = device.memory_stats() or {}
                for kind, name in MEMORY_STATS.items():
                    if name in stats:
                        memory[kind] = memory.get(kind, 0) + stats[name]
        return memory

    def close(self) -> None:
        self.loader.close()
        self.evaluation_loader.close()
        self.checkpoint_store.close()


HOST = "cpu"
"""Device on which loaders decode: batches reach the accelerators as pixels."""


def build_trainer(
    config: RunConfig,
    world: World,
    shard_set: ShardSet,
    model_directory: Path,
    checkpoint_store: CheckpointStore,
    training_logger: TrainingLogger,
    stop_request: StopRequest,
) -> JaxTrainer:
    """Build the trainer of a run document. Every process must call this at the same time."""
    train, training_split, classes = config.train, shard_set.split("train"), len(shard_set.classes)
    validate_world(config, len(world.devices), len(training_split))
    mesh = mesh_for_config(config, world.devices)
    step = build_train_step(config, mesh, classes)
    step = replace(step, run_steps=synchronize_first_call(step.run_steps, world, "the first update"))
    prefetcher = DevicePrefetcher(mesh, train.steps_per_call)
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
        prefetcher=prefetcher,
        loader=build_training_loader(config, world, mesh, training_split),
        evaluation_loader=evaluation_loader,
        evaluator=evaluator,
        step_sync=StepSync(mesh, world.rank, prefetcher.local_ranks),
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
    """Build the evaluator of the validation split and its loader. The caller closes the loader."""
    split = shard_set.split("validation")
    loader = build_evaluation_loader(
        config, split, ranks=loader_ranks(world, mesh), world_size=axis_size(mesh, RANKS), device=HOST
    )
    return loader, Evaluator(config, mesh, layout, loader, len(split), world, count_images)


def build_training_loader(config: RunConfig, world: World, mesh: Mesh, split: Split) -> Loader:
    """Build the loader of this process's part of the training batches. The caller closes it."""
    sampler = build_sampler(config, split)
    return build_loader(
        config,
        split,
        sampler,
        phases=schedules.image_phases(config, len(split)),
        ranks=loader_ranks(world, mesh),
        world_size=axis_size(mesh, RANKS),
        device=HOST,
    )


def loader_ranks(world: World, mesh: Mesh) -> range:
    """Return the ranks of the sample order that this process reads: its devices, or its groups that share images."""
    held = axis_size(mesh, RANKS) // world.size
    return range(world.rank * held, (world.rank + 1) * held)
