"""`JaxTrainer`: one process of a JAX training run, and the functions that build it from the run document."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import Any

import numpy.typing as npt
from jax import Array
from jax.sharding import Mesh

from podscale.config import RunConfig
from podscale.config.batch_phases import BatchPhase
from podscale.data.loaders.base import Loader
from podscale.data.shard_set import ShardSet, Split
from podscale.data.step_positions import StepPositions, step_positions
from podscale.distributed.step_status import StepStatus, StopRequest
from podscale.jax.device_prefetcher import LOADER_DEVICE, DeviceBatches, DevicePrefetcher
from podscale.jax.evaluator import Evaluator
from podscale.jax.mesh import RANKS, axis_size, mesh_for_config, put_replicated
from podscale.jax.out_of_memory import explain_training_memory
from podscale.jax.program_cache import synchronize_first_call
from podscale.jax.step_sync import StepSync
from podscale.jax.train_state import TrainState, restore_or_start
from podscale.jax.train_step import TrainStep, build_train_step
from podscale.jax.world import World, loader_ranks
from podscale.runs.checkpoint import CheckpointStore, Snapshot
from podscale.training import schedules
from podscale.training.initial_weights import load_initial_weights
from podscale.training.run_progress import EvaluationResult
from podscale.training.startup_checks import validate_world
from podscale.training.trainer import Trainer
from podscale.training.training_logger import TrainingLogger
from podscale.training.worker_stages import open_training_loader

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
    phase_config: RunConfig
    """Document with the batch of the current steps."""

    def restore(self) -> bool:
        initial_weights = partial(load_initial_weights, self.config, self.shard_set)
        return restore_or_start(self.checkpoint_store, self.config.checkpoint.resume, self.state, initial_weights)

    def batches_of_phase(self, stop: int) -> Iterator[DeviceBatches]:
        batches = self.loader.batches(self.progress.step, stop)
        return self.prefetcher(batches, self.training_logger.timer.phase, self.next_step_count)

    def set_batch_phase(self, phase: BatchPhase) -> None:
        """Prepare another program: all processes compile it together at its first call."""
        built = self.phase_config.train
        if (phase.global_batch, phase.accumulation) == (built.global_batch, built.accumulation):
            return  # the program that the trainer began with
        self.phase_config = phase.apply(self.config)
        self.step = build_synchronized_step(
            self.phase_config, self.step.mesh, len(self.shard_set.classes), self.plan.positions, self.world
        )

    def train_step(self, batch: DeviceBatches) -> list[StepStatus]:
        """Run the steps of a stack of batches, one for each, in one program."""
        timer, progress, state = self.training_logger.timer, self.progress, self.state
        assert self.batch_phase, "train() has entered one"
        count = len(batch.host_batches)
        with timer.phase("forward_backward"):
            inputs = self.step_sync.step_inputs(
                count, stop=self.stop_request.requested, busy_seconds=timer.busy_seconds
            )
            with explain_training_memory(self.config, self.batch_phase, len(self.world.devices)):
                state.device_state, results = self.step.run_steps(
                    state.device_state, batch.device_batches, self.schedule, inputs
                )
            self.step_sync.send(progress.step, count, results)
        timer.wait_started()
        with timer.phase("forward_backward"):
            statuses = self.step_sync.ready()
        progress.step += count
        self.training_logger.step_done(progress.step, batch.images // count, self.loader.bad_records, steps=count)
        return statuses

    def next_step_count(self) -> int:
        """Return the number of steps of the next call: up to the first after which something else is due."""
        log_every, step = self.config.telemetry.log_every, self.progress.step
        longest = range(step + 1, step + self.prefetcher.length)
        return 1 + sum(1 for _ in takewhile(lambda n: n % log_every and not self.plan.is_due_after(n), longest))

    def evaluate_weights(self, *, averaged: bool) -> EvaluationResult | None:
        statistics = self.state.device_state.statistics
        return self.evaluator.evaluate(
            self.state.unshard_evaluation_weights(),
            statistics,
            self.training_logger.timer.subphase,
            lambda: self.stop_request.requested,
        )

    def capture_state(self) -> Snapshot | None:
        return self.state.capture()

    def model_arrays(self, *, averaged: bool) -> dict[str, npt.NDArray[Any]]:
        return self.state.model_arrays()

    def device_memory(self) -> dict[str, int]:
        memory: dict[str, int] = {}
        for device in self.world.local_devices:
            with suppress(Exception):  # a device without statistics must not fail the run
                stats = device.memory_stats() or {}
                for kind, name in MEMORY_STATS.items():
                    if name in stats:
                        memory[kind] = memory.get(kind, 0) + stats[name]
        return memory


def build_trainer(
    config: RunConfig,
    world: World,
    shard_set: ShardSet,
    checkpoint_store: CheckpointStore,
    training_logger: TrainingLogger,
    stop_request: StopRequest,
) -> JaxTrainer:
    """Build the trainer of a run document. Every process must call this at the same time."""
    train, split, classes = config.train, shard_set.split("train"), len(shard_set.classes)
    validate_world(config, len(world.devices), len(split))
    mesh = mesh_for_config(config, world.devices, world.processes_per_node)
    step = build_synchronized_step(config, mesh, classes, step_positions(train, len(split)), world)
    prefetcher = DevicePrefetcher(mesh, train.steps_per_call)
    count_images = training_logger.metrics.count_evaluated_images
    return JaxTrainer(
        config=config,
        phase_config=config,
        shard_set=shard_set,
        world=world,
        evaluator=Evaluator(config, world, mesh, step.layout, shard_set, count_images),
        state=TrainState(config, classes, step, world),
        step=step,
        schedule=put_replicated(schedules.step_table(train, len(split)), mesh),
        prefetcher=prefetcher,
        loader=build_training_loader(config, world, mesh, split),
        step_sync=StepSync(mesh, world.rank, prefetcher.local_ranks),
        stop_request=stop_request,
        training_logger=training_logger,
        checkpoint_store=checkpoint_store,
    )


def build_synchronized_step(
    config: RunConfig, mesh: Mesh, classes: int, positions: StepPositions, world: World
) -> TrainStep:
    """Build the step of a document, whose first call waits until every process has compiled it."""
    step = build_train_step(config, mesh, classes, positions)
    return replace(step, run_steps=synchronize_first_call(step.run_steps, world, "the first step"))


def build_training_loader(config: RunConfig, world: World, mesh: Mesh, split: Split) -> Loader:
    """Build the loader of this process's part of the training batches. The caller closes it."""
    ranks, world_size = loader_ranks(world, mesh), axis_size(mesh, RANKS)
    return open_training_loader(config, split, ranks=ranks, world_size=world_size, device=LOADER_DEVICE)
